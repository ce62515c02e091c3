"""`meshwright compare`: layouts of one run, measured on this machine beside what the planner predicts of them."""
