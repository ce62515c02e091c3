"""The planner against published results: cases as data, predicted and published figures, the mean error per paper."""
