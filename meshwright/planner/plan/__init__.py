"""The planner: what a layout costs on a described cluster, in time and memory, and which layout is the best."""
