"""Models, each written once against the kit: not a line about parallelism in here."""
