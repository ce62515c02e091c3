"""The wheel that turns a run's parts: loop, step report, metrics, and the entry function of a training worker."""
