"""`meshwright calibrate`: measure this machine's devices and links into a cluster file for the planner.

cli ── calibrate(...) ── job.py ──┬─ kernels.py   a rank on every core or GPU times its device
                                       ├─ links.py     as many ranks as asked for time the verbs between them
                                       ├─ fit.py       points to the curves and rates of plan/cluster.py
                                       └─ report.py    the file, and what is shown of it
"""
