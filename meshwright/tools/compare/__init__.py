"""`meshwright compare`: layouts of one run, measured on this machine and predicted by the planner."""
