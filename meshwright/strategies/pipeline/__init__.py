"""Pipeline parallelism: contiguous stages driven by messages (AxoNN, Singh and Bhatele, IPDPS 2022).

A schedule chooses tasks (a pure function of a view), a stage computes tasks, and a driver waits for messages. Both a
simulated clock and a rank drive the same engine.
"""
