"""The optimizer over slots: the global norm, clipping, loss scaling, and torch's own steps on masters and moments."""
