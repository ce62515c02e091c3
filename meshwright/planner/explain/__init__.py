"""`meshwright explain`: a run under its layout, in tables and as a page. Nothing is trained."""
