"""Tuning on the real device: a twin of the default must not replace it, and what is confirmed is a legal answer."""

from __future__ import annotations

import numpy as np
import pytest

from sessions import tune
from tunewright.knowledge.record import from_line, to_line
from tunewright.measure.local import LocalMeasurer
from tunewright.plugins.single import open_device
from tunewright.solvers.base import Solver, solvers
from tunewright.testing.kernelcheck import Case

DEVICE = open_device("CPU")
#: draws the tables of this module, once, when it is imported; tests draw from their own (the fixture rng)
TABLES = np.random.default_rng(0)
SEED = 1000
CASE = Case("MatMul", [TABLES.standard_normal((64, 96), np.float32), TABLES.standard_normal((96, 80), np.float32)],
            constant=frozenset({1}))  # fmt: skip
PROBLEM = CASE.problem()
OFFERED = [
    s for s in solvers()
    if s.language in (None, DEVICE.target.language) and not s.host and (s.ops is None or PROBLEM.op in s.ops)
    and s.why_not(PROBLEM, DEVICE.target) is None
]  # fmt: skip
DEFAULT = (OFFERED[0].id, OFFERED[0].default(PROBLEM, DEVICE.target))


class Twin(Solver):
    """The default's solver under another name."""

    id = f"{OFFERED[0].id}.twin"

    def why_not(self, problem, target):
        return OFFERED[0].why_not(problem, target)

    def default(self, problem, target):
        return OFFERED[0].default(problem, target)

    def space(self, problem, target):
        return OFFERED[0].space(problem, target)

    def compile(self, problem, config, device):
        return OFFERED[0].compile(problem, config, device)


def changes(count: int, seconds: float) -> int:
    """How often a twin replaces the default."""
    pair = [OFFERED[0], Twin()]
    changed = 0
    with LocalMeasurer(DEVICE, pair) as measurer:
        for seed in range(count):
            found = tune(
                PROBLEM, DEVICE.target, DEFAULT, pair, measurer, strategy=lambda solver: None, seconds=seconds,
                seed=seed,
            )  # fmt: skip
            assert found.records and not found.faults, found.reason
            changed += found.changed
    return changed


def test_a_twin_does_not_replace_the_default():
    assert changes(4, 1.0) <= 1


@pytest.mark.soak
def test_a_twin_does_not_replace_the_default_in_200_sessions():
    assert changes(200, 3.0) < 4


def test_the_records_of_a_session_can_be_read():
    with LocalMeasurer(DEVICE) as measurer:
        found = tune(PROBLEM, DEVICE.target, DEFAULT, OFFERED, measurer, strategy="auto", seconds=2.0)
    assert found.attempted >= 1 and found.records, found.reason
    for record in found.records:
        assert from_line(to_line(record)) == record and record.key.solver in {s.id for s in OFFERED}
    assert found.chosen == DEFAULT or (found.gain and found.gain.low >= 1.01)
