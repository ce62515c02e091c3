"""Training: the loop, the step report, metrics, and the entry function of a worker."""
