"""Writing down the kernels that a compiled model uses: `lock`."""

from __future__ import annotations

import os

from ..solvers.base import Problem
from ..tuning.key import Where
from ..tuning.lockfile import Entry, LockFile, Written
from ..tuning.tuner import Choice, Origin
from .counting import Counted
from .explain import steps
from .late import LateKernel
from .request import DeviceModel


def lock(compiled: DeviceModel, path: str | os.PathLike[str]) -> Written:
    """Add the kernels of every problem that the model has posed so far to a lockfile; makes the file.

    What was posed: the plans of all shapes that it ran with, bodies and later segments among them.
    """
    for plan in compiled.program.plans:
        for _, step, _ in steps(plan):
            if isinstance(step.control, Counted):  # a frozen model may have to go around its launch
                step.control.prepare()
    names = _nodes(compiled)
    where = Where.of(compiled.env.device.target)
    entries = {}
    for problem, device, choice in list(compiled.env.tuner.chosen.values()):
        if Where.of(device.target) != where:  # parts of a model on several devices share their tuner
            continue
        gain = None if choice.measurement is None else choice.measurement.evidence.gain.median
        nodes = names.get(problem.key(), ())
        entries[problem.key()] = Entry.of(
            problem, device.target, choice.solver, choice.config, nodes, _origin(choice), gain
        )
    return LockFile(path).add(where, compiled.settings.execution_mode_hint, entries)


def _origin(choice: Choice) -> str:
    """What a later load would say: a search leaves its answer in the user's knowledge base."""
    origin = Origin.USER if choice.origin is Origin.SEARCH else choice.origin
    return str(origin.value)


def _nodes(compiled: DeviceModel) -> dict[str, set[str]]:
    """Who poses each problem, as far as plans are kept."""
    found: dict[str, set[str]] = {}
    for plan in compiled.program.plans:
        for _, step, _ in steps(plan):
            name = step.node.name or step.node.output.name
            if isinstance(step.kernel, LateKernel):
                for key in step.kernel.problems:
                    found.setdefault(key, set()).add(name)
            elif step.choice is not None:
                found.setdefault(Problem.of(step.node).key(), set()).add(name)
    return found
