"""Ranks: their grid, the verbs and mailboxes between them, and the watch over who waits for whom."""
