"""Public users' files and habits, end to end: each case prints the right value next to the value that was printed."""
