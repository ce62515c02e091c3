"""Data and sub-graph parallelism (SUPER, IPDPS 2021): the branches of a network dealt over sub-grids of ranks."""
