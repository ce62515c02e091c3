"""Pipeline parallelism: contiguous stages that act on messages (AxoNN, Singh and Bhatele, IPDPS 2022).

Three places: a schedule decides (pure: a view to a task), a stage acts, a driver waits. The engine is the same under
a clock that computes and under one that runs.
"""
