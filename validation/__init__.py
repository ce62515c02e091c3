"""The planner against published results: cases as data, predicted beside published, the mean error per paper."""
