"""Data and sub-graph parallelism (SUPER, IPDPS 2021): the branches of a network assigned to sub-grids of ranks."""
