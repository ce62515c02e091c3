"""Equal bits under every layout: kernel calls of one fixed shape, and sums that do not depend on the order."""
