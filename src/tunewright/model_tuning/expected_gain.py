"""Gains that tuning has promised so far, and gains that may be expected of the remaining layers.

A layer's *hope* is the most that a search might save of an inference. The *expected* saving is a share of it: the share
of their hope that layers of the same operation have saved so far. It is mixed with `PRIOR`, as if one layer of average
hope had saved that share. At first a fifth of the hope is expected; with more searched layers their gains count more.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..measure.base import Candidate
from ..tuning.progress import Progress
from .layers import NO_TIME, TunedLayer, TuningResult

#: Share of its hope that a layer is expected to save while no layer like it was searched.
PRIOR = 0.2
#: Reasons for skipping a layer that a later run may search.
LATER = (NO_TIME, "stopped")
#: Beginnings of the reasons of interrupted searches.
_ENDED = ("stopped before", "broken off")


def promised(layer: TunedLayer, at: Progress | None = None) -> float:
    """Return the known speed-up of a layer."""
    if at is not None:
        return max(1.0, at.default_seconds / at.best_seconds) if at.best_seconds < float("inf") else 1.0
    if layer.chosen is not None:
        return layer.gain
    found = layer.outcome
    if layer.network or found is None:
        return 1.0
    # the search's gains are used until the network has decided
    gains: dict[Candidate, float] = {(m.key.solver, m.config): m.evidence.gain.median for m in found.records}
    return max(1.0, *gains.values()) / gains.get(layer.present, 1.0) if gains else 1.0


def saved(layer: TunedLayer, at: Progress | None = None) -> float:
    """Return the seconds of an inference that are promised so far."""
    return layer.seconds * (1 - 1 / promised(layer, at))


def is_waiting(layer: TunedLayer) -> bool:
    """Whether the layer is being searched or will be in this run."""
    return layer.outcome is None and not layer.skipped


def is_left(layer: TunedLayer) -> bool:
    """Whether a finished run left the layer: its search had no time or gave no clear result."""
    if layer.outcome is None:
        return not layer.skipped or layer.skipped in LATER
    return layer.chosen is None and (layer.outcome.is_open or layer.outcome.reason.startswith(_ENDED))


def expected(layers: Sequence[TunedLayer], of: Sequence[TunedLayer]) -> float:
    """Return the seconds of an inference that searches of layers ``of`` may save.

    ``layers``: the layers that experience comes from.
    """
    done = [layer for layer in layers if layer.outcome is not None]
    hopes = [layer.hope for layer in layers if layer.hope > 0]
    typical = sum(hopes) / len(hopes) if hopes else 0.0
    total = 0.0
    for layer in of:
        alike = [other for other in done if other.problem.op == layer.problem.op and other is not layer]
        hope = typical + sum(other.hope for other in alike)
        gained = PRIOR * typical + sum(min(saved(other), other.hope) for other in alike)
        total += layer.hope * (gained / hope if hope else 0.0)
    return total


def overall(results: Sequence[TuningResult], weights: Sequence[float] = ()) -> float:
    """Return the speed-up of all results together.

    ``weights``: share of the time that each took before; by default equal.
    """
    parts = list(weights) or [1.0] * len(results)
    after = sum(part / _gain(result) for part, result in zip(parts, results, strict=True))
    return sum(parts) / after if after else 1.0


def _gain(result: TuningResult) -> float:
    if result.gain is not None:
        return result.gain.median
    return result.before / result.after if result.before and result.after else 1.0
