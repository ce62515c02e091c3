"""Context parallelism: every sequence cut over ranks, also inside of attention."""
