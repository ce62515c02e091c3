"""Step times of Meshwright's strategies and of the usual programs, interleaved in one run on one machine."""
