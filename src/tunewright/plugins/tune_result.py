"""The file that tells what a tuning did: `tune_result_{timestamp}_pid{pid}.json`, there from the start of tuning.

One JSON object, written anew (atomically) whenever there is news, so that it can be watched and survives any end:

========== ==========================================================================================================
schema     "tunewright.tune/1"
state      "profile", "search", "network", "whole" while it works, then "finished" or "stopped"
model      its file or name; ``device``, ``where`` (processor, runtime, software), ``settings``, ``environment``
budget     seconds that it was given; ``elapsed`` those that it took so far, ``phases`` seconds by phase
layers     per problem: ``problem``, ``op``, ``nodes``, ``seconds`` per inference before and ``after``, ``floor``
           (seconds at the device's roofline, null where nobody knows) and ``bound`` (arithmetic or memory), ``before``
           (solver, config, origin), ``budget``, ``skipped`` (why it was not searched), ``reason`` (what the search
           found), ``trials`` (solver, config, status, seconds, why, at), ``network`` (solver, config, gain in the
           network), ``chosen``
result     ``before`` and ``after`` in seconds, ``gain`` [median, low, high, pairs], ``error``, ``undone`` (problems)
========== ==========================================================================================================
"""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..devices.base import Device
from ..tuning import evidence
from ..tuning.key import WHERE_FIELDS, Where
from ..tuning.measure import Candidate
from ..tuning.record import Ratio
from .tune import Layer, Result, State

SCHEMA = "tunewright.tune/1"


class ResultFile:
    """Writes the file. An error of the disk is remembered in ``problem``, and tuning goes on."""

    def __init__(self, folder: Path, model: str, device: Device, settings: Mapping[str, Any], budget: float) -> None:
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d%H%M%S")
        self.path = folder / f"tune_result_{stamp}_pid{os.getpid()}.json"
        self.problem = ""
        where = Where.of(device.target)
        self._head = {
            "schema": SCHEMA, "state": "profile", "model": model, "device": device.name,
            "where": {name: getattr(where, name) for name in WHERE_FIELDS}, "settings": dict(settings),
            "environment": evidence.environment(), "budget": budget,
        }  # fmt: skip
        self._write({**self._head, "elapsed": 0.0, "phases": {}, "layers": []})

    def update(self, state: State) -> None:
        """News while it works."""
        layers = [layer_json(layer) for layer in state.layers]
        self._write({**self._head, "state": state.phase, "elapsed": state.elapsed, "phases": {}, "layers": layers})

    def finish(self, result: Result) -> None:
        """The end."""
        self._write({**self._head, **result_json(result)})

    def _write(self, content: Mapping[str, Any]) -> None:
        unfinished = self.path.with_suffix(".unfinished")
        try:
            unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(unfinished, self.path)
        except OSError as error:
            self.problem = str(error)


def result_json(result: Result) -> dict[str, Any]:
    """What became of a model."""
    return {
        "state": "stopped" if result.stopped else "finished",
        "elapsed": sum(result.seconds.values()),
        "phases": result.seconds,
        "layers": [layer_json(layer) for layer in result.layers],
        "result": {
            "before": result.before, "after": result.after, "gain": _ratio(result.gain), "error": result.error,
            "undone": [layer.problem.key() for layer in result.undone],
        },
    }  # fmt: skip


def layer_json(layer: Layer) -> dict[str, Any]:
    """What became of a layer."""
    choice, outcome = layer.choice, layer.outcome
    return {
        "problem": layer.problem.key(),
        "op": layer.problem.op,
        "nodes": layer.nodes,
        "seconds": layer.seconds,
        "after": layer.seconds / layer.gain,
        "floor": layer.floor,
        "bound": layer.bound,
        "before": {"solver": choice.solver.id, "config": dict(choice.config), "origin": choice.why},
        "budget": layer.budget,
        "skipped": layer.skipped,
        "reason": outcome.reason if outcome is not None else "",
        "trials": [
            {**_candidate(t.candidate), "status": str(t.status), "why": t.why, "at": t.at,
             "seconds": t.seconds if math.isfinite(t.seconds) else None}
            for t in (outcome.trials if outcome is not None else ())
        ],
        "network": [{**_candidate(c), "gain": _ratio(ratio)} for c, ratio in layer.network.items()],
        "chosen": _candidate(layer.chosen) if layer.chosen is not None else None,
    }  # fmt: skip


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {"solver": candidate[0], "config": dict(candidate[1])}


def _ratio(ratio: Ratio | None) -> Sequence[float] | None:
    return None if ratio is None else [ratio.median, ratio.low, ratio.high, ratio.pairs]
