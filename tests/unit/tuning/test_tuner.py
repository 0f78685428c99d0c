"""The choice of a solver: origin, refusals, and what fusion is told."""

from dataclasses import replace

import pytest

from tunewright.devices.host import HostDevice
from tunewright.devices.null import NullDevice
from tunewright.errors import UnsupportedError
from tunewright.ir.graph import Fused, Graph
from tunewright.ir.types import DType, TensorType
from tunewright.settings import Settings
from tunewright.solvers.base import Problem, Solver
from tunewright.tuning.tuner import Origin, Tuner


class Fake(Solver):
    """Accepts what ``accepts`` says."""

    def __init__(self, id, accepts, rank=100, host=False):
        self.id, self.accepts, self.rank, self.host = id, accepts, rank, host

    def why_not(self, problem, target):
        return None if self.accepts(problem) else "too hard"

    def compile(self, problem, config, device):
        raise AssertionError("nothing is compiled here")


HOST = Fake("host", lambda p: True, host=True)
PLAIN = Fake("plain", lambda p: not p.epilogue)
ANY = Fake("any", lambda p: True)


def problem(*epilogue):
    graph = Graph()
    type = TensorType(DType.FLOAT32, (2, 3))
    node = graph.add("Relu", [graph.add_input("x", type)], types=[type])
    return Problem.of(node, (), tuple(Fused(op, (~0,)) for op in epilogue))


def test_the_first_that_accepts_is_the_default_and_the_others_say_why():
    choice = Tuner(Settings(), [PLAIN, HOST]).choose(problem("Neg"), NullDevice())
    assert (choice.solver.id, choice.origin, choice.rejected) == ("host", Origin.DEFAULT, {"plain": "too hard"})


def test_nobody_accepts():
    with pytest.raises(UnsupportedError, match="no solver for Relu on NULL: plain: too hard"):
        Tuner(Settings(), [PLAIN]).choose(problem("Neg"), NullDevice())


def test_host_fallback_may_be_forbidden():
    tuner = Tuner(Settings.make({"HOST_FALLBACK": "NO"}, Settings()), [PLAIN, HOST])
    assert tuner.ask(problem("Neg"), NullDevice()) == ([], {"plain": "too hard", "host": "HOST_FALLBACK is NO"})
    assert tuner.choose(problem("Neg"), HostDevice()).solver is HOST, "on the host nothing falls back"


def test_fusion_must_not_drive_work_from_the_device_to_the_host():
    fused, plain = problem("Neg"), problem()
    assert Tuner(Settings(), [ANY, HOST]).why_not_fused(fused, plain, NullDevice()) is None
    refusal = Tuner(Settings(), [PLAIN, HOST]).why_not_fused(fused, plain, NullDevice())
    assert refusal == "fused, only the host could run it: plain: too hard"
    assert Tuner(Settings(), [HOST]).why_not_fused(fused, plain, NullDevice()) is None, "it ran on the host before"
    assert Tuner(Settings(), [PLAIN]).why_not_fused(fused, plain, NullDevice()) == "plain: too hard"


def test_keys_tell_problems_apart():
    assert problem().key() == "Relu(float32[2,3]) -> float32[2,3]"
    assert problem("Neg").key() == "Relu(float32[2,3]) -> float32[2,3] | Neg(-1)"
    assert len({problem(), problem(), problem("Neg")}) == 2
    three = replace(problem(), op="Sum", inputs=problem().inputs * 3, constant=(False, False, True))
    assert three.key() == "Sum(float32[2,3], float32[2,3], float32[2,3]!) -> float32[2,3]"
    assert replace(three, operands=1).key() == "Sum(float32[2,3], float32[2,3]; float32[2,3]!) -> float32[2,3]"
