"""`meshwright submit`: a run, as the engine of a cluster wants to be asked for it."""
