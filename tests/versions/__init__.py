"""Which promise another release of a dependency breaks."""
