"""A solver for the Null device: every kernel writes zeros and takes the time that the device's script specifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..devices.base import Device, Queue, Target
from ..devices.null import NullDevice, NullQueue
from .base import Config, Kernel, Problem, Solver


class NullSolver(Solver):
    """Accepts every problem whose shapes are known."""

    id = "null.any"
    rank = 500
    language = "null"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return None if problem.is_static else "shapes are not known"

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        assert isinstance(device, NullDevice)
        return NullKernel(problem, device.script(self.id, problem.key()))


class NullKernel(Kernel):
    """Writes zeros, and advances the scripted clock."""

    name = "null.any"

    def __init__(self, problem: Problem, seconds: float) -> None:
        self.problem, self.seconds = problem, seconds

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        if isinstance(queue, NullQueue):
            queue.advance(self.seconds)
        made = []
        for out, type in zip(outputs, self.problem.outputs, strict=True):
            if out is None:
                out = np.zeros(type.dims, type.dtype.numpy)  # type: ignore[union-attr]
            elif out.dtype != object:
                out[...] = np.zeros((), out.dtype)
            made.append(out)
        return made


SOLVERS = (NullSolver(),)
