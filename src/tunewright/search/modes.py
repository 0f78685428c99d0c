"""AutoTune's modes: they map each class of operators to a strategy.

The mode is one text, as in MindSpore's ``auto_tune_mode``: ``NO_TUNE``, ``RL``, ``GA``, or both in either order.
"""

from __future__ import annotations

from ..errors import SettingsError

#: Used when both are allowed: many cheap, similar operators share a learnt policy; the few expensive ones get a wide
#: search.
RL_CLASSES = frozenset({"broadcast", "reduce", "elementwise", "elewise"})
GA_CLASSES = frozenset({"conv", "matmul", "cube"})

_STRATEGY = {"RL": "reinforce", "GA": "genetic"}


def strategy_for(mode: str, op_class: str) -> str | None:
    """Return the name of the strategy for a class of operators, or None if they are not to be tuned.

    A single mode serves every class. With both, RL serves broadcast, reduce and elementwise, GA serves conv and matmul.
    GA also serves all other classes, because it needs no similarity between operators.
    """
    parts = [part.strip().upper() for part in mode.split(",")]
    if parts == ["NO_TUNE"]:
        return None
    if not set(parts) <= set(_STRATEGY) or len(set(parts)) != len(parts):
        raise SettingsError(f"there is no mode {mode!r}", where="auto tune mode", hint="NO_TUNE, RL, GA or RL,GA")
    if len(parts) == 1:
        return _STRATEGY[parts[0]]
    normal = op_class.lower().replace("-", "").replace("_", "")
    return _STRATEGY["RL"] if normal in RL_CLASSES else _STRATEGY["GA"]
