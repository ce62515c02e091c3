"""Jobs of other programs: files read as runs, with an account of each field, and layouts in other programs' words."""
