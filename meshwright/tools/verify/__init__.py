"""The proof: a layout computes what one device computes. Losses, every gradient, and the weights after some steps."""
