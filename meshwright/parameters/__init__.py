"""What a rank holds of each parameter, and the flat memory in which parameters and gradients live."""
