"""What leaves the device and comes back: the optimizer's states in host memory or on disk."""
