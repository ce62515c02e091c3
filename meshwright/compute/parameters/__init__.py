"""A rank's part of each parameter, and the flat memory in which parameters and gradients live."""
