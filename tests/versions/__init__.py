"""The promises that another release of a dependency breaks."""
