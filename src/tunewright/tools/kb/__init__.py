"""``tunewright kb``: everything that looks into knowledge bases or changes them. `command` is the entry."""
