"""Tuning on the Null device with the real measurer: kernels compute on the host and take the time of a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sessions import duel, tune
from tunewright.devices.base import Device, Queue, Target
from tunewright.devices.null import NullDevice, NullQueue
from tunewright.ir.types import DType, TensorType
from tunewright.measure.local import LocalMeasurer
from tunewright.search import Config, Space, Status
from tunewright.solvers.base import Kernel, Problem, Solver
from tunewright.solvers.host.reference import HostKernel
from tunewright.tuning.session import Outcome

TYPE = TensorType(DType.FLOAT32, (8, 16))
PROBLEM = Problem("Mul", (TYPE, TYPE), (TYPE,), {}, constant=(False, False))
SPACE = {"tile": [1, 2, 4, 8], "unroll": [1, 2, 4]}
DEFAULT = ("scripted", Config(tile=2, unroll=1))
COMPILE = 0.1


class Scripted(Solver):
    """``script(config)`` is how long a kernel takes; where it says so in words, the kernel does something else."""

    language = "null"

    def __init__(self, script: Any, id: str = "scripted") -> None:
        self.script, self.id = script, id

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return None

    def default(self, problem: Problem, target: Target) -> Config:
        return DEFAULT[1]

    def space(self, problem: Problem, target: Target) -> Space:
        return Space(SPACE)

    def source(self, problem: Problem, config: Mapping[str, Any], target: Target) -> str:
        return f"{self.id} {sorted(config.items())}"

    def compile(self, problem: Problem, config: Mapping[str, Any], device: Device) -> Kernel:
        assert isinstance(device, Clocked)
        device.clock.advance(COMPILE)
        found = self.script(config)
        if found == "no compile":
            raise ValueError("the compiler refused")
        return ScriptedKernel(problem, found)


class ScriptedKernel(Kernel):
    name = "scripted"

    def __init__(self, problem: Problem, what: Any) -> None:
        self.inner, self.what, self.runs = HostKernel(problem), what, 0

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        assert isinstance(queue, NullQueue)
        self.runs += 1
        made = self.inner.run(queue, inputs, outputs)
        if self.what == "wrong" or (self.what == "wrong later" and self.runs > 20):
            outputs[0][...] *= 1.01
        queue.advance({"wrong": 0.5e-3, "wrong later": 0.5e-3, "no time": 0.0, "back": -1e-3}.get(self.what, self.what))
        return made


class Clocked(NullDevice):
    """Its queue's clock is the time of the world."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = NullQueue()

    def queue(self) -> NullQueue:
        return self.clock


Scripts = Mapping[str, Any]


def run(script: Any, others: Scripts | None = None, seconds: float = 10.0, **options: Any) -> tuple[Outcome, float]:
    device = Clocked()
    solvers = [Scripted(script), *(Scripted(other, id) for id, other in (others or {}).items())]
    with LocalMeasurer(device, solvers, device.clock.now) as measurer:
        options = {"strategy": "auto", "clock": device.clock.now, **options}
        found = tune(PROBLEM, device.target, DEFAULT, solvers, measurer, seconds=seconds, **options)
    return found, device.clock.now()


def fast_at(tile: int, unroll: int, seconds: Any = 0.8e-3) -> Any:
    return lambda config: seconds if (config["tile"], config["unroll"]) == (tile, unroll) else 1e-3


def test_the_faster_one_wins_whatever_the_seed_and_strategy():
    for seed, strategy in enumerate(["auto", "random", "genetic", "exhaustive"]):
        outcome, _ = run(fast_at(8, 4), seed=seed, strategy=strategy)
        assert outcome.changed and outcome.chosen == ("scripted", {"tile": 8, "unroll": 4})
        assert outcome.gain and outcome.gain.low == pytest.approx(1.25) == outcome.gain.high
        assert outcome.attempted == 12 and not outcome.faults


def test_what_others_decide_is_left_open():
    outcome, _ = run(fast_at(8, 4), decide=False)
    assert not outcome.changed and outcome.chosen == DEFAULT and outcome.gain is None
    found = {m.config: m.evidence for m in outcome.records}
    assert found[Config(tile=8, unroll=4)].gain.median == pytest.approx(1.25)
    assert not any(e.confirmed for e in found.values()), "nothing answers before somebody has decided"
    outcome, _ = run(fast_at(2, 1), decide=False)
    found = {m.config: m.evidence for m in outcome.records}
    assert found[DEFAULT[1]].confirmed, "nothing is faster: that is an answer"
    outcome, _ = run(fast_at(2, 1), decide=False, seconds=0.15)
    assert not any(m.evidence.confirmed for m in outcome.records), "too little was tried"


def test_decisions_repeat():
    def story() -> Any:
        outcome, end = run(lambda c: 1e-3 / (1 + 0.1 * c["tile"] - 0.02 * c["unroll"]), seed=5, seconds=1.0)
        return outcome.chosen, outcome.reason, outcome.trials, outcome.seconds, end

    assert story() == story()


def test_equal_or_slower_keeps_the_default():
    for script in (lambda c: 1e-3, lambda c: 1e-3 if c == DEFAULT[1] else 1.001e-3, fast_at(8, 4, 0.995e-3)):
        outcome, _ = run(script)
        assert not outcome.changed and outcome.chosen == DEFAULT, outcome.reason
        assert outcome.records[0].evidence.confirmed and outcome.records[0].config == DEFAULT[1]


@pytest.mark.parametrize("what", ["wrong", "wrong later", "no time", "back"])
def test_what_is_wrong_is_never_chosen(what: str):
    outcome, _ = run(fast_at(8, 4, what), {"spare": lambda c: 0.9e-3})
    assert outcome.chosen[0] == "spare", outcome.reason
    assert [(f.config, f.status) for f in outcome.faults] == [({"tile": 8, "unroll": 4}, Status.WRONG)]


def test_what_does_not_compile_is_no_fault():
    outcome, _ = run(fast_at(8, 4, "no compile"))
    assert not outcome.changed and not outcome.faults and outcome.failed == 1
    assert [t.why for t in outcome.trials if t.status is not Status.OK] == ["ValueError: the compiler refused"]


def test_a_wrong_default_is_replaced():
    outcome, _ = run(fast_at(2, 1, "wrong"))
    assert outcome.changed and outcome.default_fault and "wrong" not in outcome.chosen[1]
    assert [f.config for f in outcome.faults] == [DEFAULT[1]] and outcome.records[0].config == outcome.chosen[1]


@pytest.mark.parametrize("seconds", [0.0, 0.35, 0.7, 1.5, 4.0])
@pytest.mark.parametrize("each", [1e-5, 1e-3, 1e-2])
def test_the_time_is_kept(seconds: float, each: float):
    outcome, end = run(lambda c: each / c["tile"], seconds=seconds)
    step = COMPILE + 60 * each  # compiling, checking, the turns of one attempt
    assert end <= 1.1 * seconds + step
    assert outcome.attempted >= 1 and outcome.records


def test_longer_finds_more():
    short, _ = run(lambda c: 1e-3 / c["tile"], seconds=0.2)
    long, _ = run(lambda c: 1e-3 / c["tile"], seconds=4.0)
    assert short.attempted < long.attempted and long.chosen[1]["tile"] == 8


def test_a_duel():
    device = Clocked()
    solvers = [Scripted(fast_at(8, 4))]
    with LocalMeasurer(device, solvers, device.clock.now) as measurer:
        for candidate, holds in [(Config(tile=8, unroll=4), True), (Config(tile=4, unroll=4), False)]:
            record = duel(
                PROBLEM, device.target, DEFAULT, ("scripted", candidate), solvers, measurer, seconds=5.0,
                clock=device.clock.now,
            )  # fmt: skip
            assert record.kind == "measurement" and record.evidence.confirmed is holds
