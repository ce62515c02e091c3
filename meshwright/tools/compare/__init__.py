"""`meshwright compare`: layouts of one run, measured on this machine beside the planner's predictions."""
