"""The references that layouts are compared with: configs, batches, runs on ranks and on one device."""
