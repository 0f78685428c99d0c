"""How candidates are judged and timed: in this process (`local`) or in a worker process (`isolated`)."""
