"""Decides which kernel runs: `tuner` chooses, `policy` says when to search, `session` searches."""
