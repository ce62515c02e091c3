"""Step times of our strategies beside the usual ones, interleaved in one run on one machine."""
