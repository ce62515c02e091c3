"""Tools ask questions of a run before, beside and after it. They may import the core, which never imports them."""
