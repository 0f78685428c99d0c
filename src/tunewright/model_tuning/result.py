"""The result file of tuning a model or problems, written by `tuning.result_file` from layers, states and results.

docs/tune-files.md describes the members of the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ..devices.base import Device
from ..frontend.model import Model
from ..settings import Settings
from ..tuning.offline import suggested_commands
from ..tuning.policy import decide
from ..tuning.result_file import ResultFile, candidate_json, choice_json, head, outcome_json, problem_json, ratio_json
from .layers import TunedLayer, TuningResult, TuningState

LOG = logging.getLogger("tunewright")


class ResultRecorder:
    """Follows a tuning and records it in TUNE_RESULT_PATH from the start."""

    def __init__(
        self, kind: str, model: str | None, device: Device, settings: Settings, budget: float,
        report: Callable[[TuningState], None] | None = None, command: str | None = None,
    ) -> None:  # fmt: skip
        """``command``: the command line that continues this tuning, if there is one."""
        named = {"AUTO_TUNE_MODE": settings.auto_tune_mode, "FIND_MODE": settings.find_mode}
        named |= {"TUNE_REGIME": settings.tune_regime, "EXECUTION_MODE_HINT": settings.execution_mode_hint}
        about = head(kind, model, device, named, budget) | {"command": command}
        self.settings = settings
        self.file = ResultFile(settings.tune_result_path, about)
        self.file.write(state="profile")
        if self.file.is_written:
            LOG.info("results go to %s", self.file.path)
        self._report = report
        self._told: set[str] = set()

    def __call__(self, state: TuningState) -> None:
        """Process a state: record it if a phase begins or a layer is done, and pass it on."""
        key = state.phase if state.at is None or state.progress is not None else state.at.problem.key()
        if key not in self._told:
            self._told.add(key)
            layers = [layer_json(layer, self.settings) for layer in state.layers]
            self.file.write(state=state.phase, elapsed=state.elapsed, layers=layers)
        if self._report is not None:
            self._report(state)

    def finish(self, result: TuningResult) -> TuningResult:
        """Record the end, and return the result with the file's content."""
        self.file.write(**result_json(result, self.settings))
        result.written, result.path = self.file.content, self.file.path
        return result


def result_json(result: TuningResult, settings: Settings) -> dict[str, Any]:
    """Return the final members for a model."""
    return {
        "state": "stopped" if result.stopped else "finished",
        "elapsed": sum(result.seconds.values()),
        "phases": result.seconds,
        "layers": [layer_json(layer, settings) for layer in result.layers],
        "result": {
            "before": result.before, "after": result.after, "gain": ratio_json(result.gain), "error": result.error,
            "energy": result.energy, "undone": [layer.problem.key() for layer in result.undone],
        },
    }  # fmt: skip


def layer_json(layer: TunedLayer, settings: Settings) -> Mapping[str, Any]:
    """Return the members for a layer."""
    return {
        **problem_json(layer.problem, layer.device.name, settings),
        "device": layer.device.name,
        "nodes": layer.nodes,
        "strategy": decide(settings).strategy(layer.problem.op) if layer.outcome is not None else None,
        "seconds": layer.seconds,
        "after": layer.seconds / layer.gain,
        "floor": layer.floor,
        "bound": layer.bound,
        "hope": layer.hope,
        "before": choice_json(layer.choice),
        "budget": layer.budget,
        "skipped": layer.skipped,
        **outcome_json(layer.outcome),
        "network": [{**candidate_json(c), "gain": ratio_json(ratio)} for c, ratio in layer.network.items()],
        "chosen": candidate_json(layer.chosen) if layer.chosen is not None else None,
    }


def tune_command(model: Model, inputs: Mapping[str, Any], device: str, settings: Settings) -> str | None:
    """Return the command that tunes a model for inputs like these; None if the model has no file."""
    if not model.path:
        return None
    shapes = {name: getattr(value, "shape", ()) for name, value in inputs.items()}
    options = [word for name, dims in shapes.items() if dims for word in ("-s", f"{name}={'x'.join(map(str, dims))}")]
    return suggested_commands.command("tune", str(model.path), options=options, device=device, settings=settings)
