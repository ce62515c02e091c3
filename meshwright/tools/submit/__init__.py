"""`meshwright submit`: a run as a job of a cluster's engine."""
