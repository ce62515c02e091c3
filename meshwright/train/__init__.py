"""The wheel that turns a run's parts: loop, pulse, metrics, and the entry function of a training worker."""
