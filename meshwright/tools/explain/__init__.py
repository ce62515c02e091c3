"""`meshwright explain`: what a layout makes of a run, in tables and as a page. Nothing is trained."""
