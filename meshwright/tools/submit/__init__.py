"""`meshwright submit`: writes a run as a job for a cluster's engine."""
