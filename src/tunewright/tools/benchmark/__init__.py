"""``tunewright benchmark``: measurement, sweeps, reports, charts and advice. `command` is the entry."""
