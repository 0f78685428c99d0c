"""Recorded tables and the replayer: test a strategy without hardware.

>>> from tunewright.testing.replay import load, replay
>>> run = replay(load(Path("A100.json.gz")), "mine", seed=1, budget=200)    # doctest: +SKIP
>>> run.at(100), run.evaluations_to(0.95), run.repeats                     # doctest: +SKIP

The code is in `tunewright.search.replay`, because the command line and the tuner use it too.
"""

from __future__ import annotations

from ..search.replay import Run, Summary, Table, load, replay

__all__ = ["Run", "Summary", "Table", "load", "replay"]
