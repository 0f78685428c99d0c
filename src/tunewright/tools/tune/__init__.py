"""``tunewright tune`` and ``tunewright report``. `command` is the entry."""
