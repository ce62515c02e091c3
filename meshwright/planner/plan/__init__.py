"""The planner: the step time and memory of a layout on a described cluster, and a search for the best layout."""
