"""AutoTune's modes: which strategy serves which class of operators.

The mode is one text, as in MindSpore's ``auto_tune_mode``: ``NO_TUNE``, ``RL``, ``GA``, or both in either order.
"""

from __future__ import annotations

from ..errors import SettingsError

#: With both allowed: the many cheap, alike operators share what a policy learnt, the few dear ones get a wide search.
RL_CLASSES = frozenset({"broadcast", "reduce", "elementwise", "elewise"})
GA_CLASSES = frozenset({"conv", "matmul", "cube"})

_STRATEGY = {"RL": "reinforce", "GA": "genetic"}


def strategy_for(mode: str, op_class: str) -> str | None:
    """The name of the strategy for a class of operators; None means: do not tune it.

    With one mode alone that one serves every class. With both, RL serves broadcast, reduce and elementwise, GA conv and
    matmul, and a class that is none of these goes to GA, which needs no kinship between operators.
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
