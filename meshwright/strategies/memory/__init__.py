"""Memory off the device: the optimizer's states in host memory or on disk."""
