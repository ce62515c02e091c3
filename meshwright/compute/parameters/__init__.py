"""This rank's part of each parameter, and the flat memory of parameters and gradients."""
