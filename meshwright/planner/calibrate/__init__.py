"""`meshwright calibrate`: measures this machine's devices and links, and writes a cluster file for the planner.

cli ── calibrate(...) ── job.py ──┬─ kernels.py   a rank on every core or GPU times the device
                                  ├─ links.py     the requested numbers of ranks time the verbs
                                  ├─ fit.py       converts points to the curves and rates of plan/cluster.py
                                  └─ report.py    writes the file, and prints the tables
"""
