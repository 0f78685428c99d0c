"""Write the kernels that a compiled model uses to a lockfile: `lock`."""

from __future__ import annotations

import os

from tunewright.knowledge.key import Where
from tunewright.solvers.base import Problem
from tunewright.tuning.lockfile import LockedKernel, LockFile, Written
from tunewright.tuning.tuner import Choice, Origin

from ..control.row_counts import Counted
from ..plans.deferred_kernels import LateKernel
from ..requests.request import DeviceModel
from .explain import steps


def lock(compiled: DeviceModel, path: str | os.PathLike[str]) -> Written:
    """Add the kernels of every problem that the model has posed so far to a lockfile. Creates the file if needed.

    Posed problems come from the plans of all shapes that it ran with, including bodies and later segments.
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
        entries[problem.key()] = LockedKernel.of(
            problem, device.target, choice.solver, choice.config, nodes, _origin(choice), gain
        )
    return LockFile(path).add(where, compiled.settings.execution_mode_hint, entries)


def _origin(choice: Choice) -> str:
    """Return the origin that a later load reports: a search leaves its answer in the user's knowledge base."""
    origin = Origin.USER if choice.origin is Origin.SEARCH else choice.origin
    return str(origin.value)


def _nodes(compiled: DeviceModel) -> dict[str, set[str]]:
    """Return the nodes that pose each problem, as far as their plans are kept."""
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
