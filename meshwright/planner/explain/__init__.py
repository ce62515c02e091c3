"""`meshwright explain`: shows a run's layout in tables and as a page, without training."""
