"""Equal bits under every layout: a grain that every kernel gets, and sums in which order cannot matter."""
