"""Jobs of other programs: files read as runs of ours, with an account of each field, and layouts in their words."""
