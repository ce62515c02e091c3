"""The optimizer over slots: torch's own steps, the global norm, clipping, master weights, loss scaling."""
