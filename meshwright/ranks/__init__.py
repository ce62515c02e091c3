"""Ranks of a job: grid, verbs, mailboxes, launchers, and the watchdog for ranks that wait too long."""
