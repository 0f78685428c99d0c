"""`bench.LocalMeasurer` on real devices: candidates are compiled, checked and timed; whoever is wrong is out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from helpers import opencl_runtime
from tunewright.devices.base import Device, Queue, Target
from tunewright.devices.host import HostDevice, cache_bytes, free_bytes
from tunewright.devices.native.table import BoundTable, LaunchTable
from tunewright.ir.types import DType, TensorType, blocked
from tunewright.measure import local as bench
from tunewright.measure import timing_buffers
from tunewright.measure.base import Candidate
from tunewright.measure.local import LocalMeasurer, floor
from tunewright.plugins.single import open_device
from tunewright.search.base import Status
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Kernel, Packing, Problem, Solver, solvers
from tunewright.solvers.host.reference import HostKernel

F, INT = DType.FLOAT32, DType.INT64


def problem(op: str, *types: Any, out: Any, constant: Sequence[int] = (), **attrs: Any) -> Problem:
    made = [t if isinstance(t, TensorType) else TensorType(F, t) for t in types]
    flags = tuple(i in constant for i in range(len(made)))
    return Problem(op, tuple(made), (out if isinstance(out, TensorType) else TensorType(F, out),), attrs, (), 0, flags)


def conv() -> Problem:
    x, y = (TensorType(F, (1, 20, 14, 14), blocked(open_device("CPU").target.vector_bytes // 4)) for _ in range(2))
    return problem("Conv", x, (20, 20, 3, 3), out=y, constant=[1], pads=(1, 1, 1, 1))


REAL = {
    "conv": conv(),
    "matmul": problem("MatMul", (33, 70), (70, 45), out=(33, 45), constant=[1]),
    "softmax": problem("Softmax", (12, 200), out=(12, 200), axis=-1),
    "gather": problem("Gather", (50, 16), TensorType(INT, (30,)), out=(30, 16), axis=0),
    "elementwise": problem("Mul", (40, 50), (50,), out=(40, 50)),
}


def default(p: Problem, device: Device) -> Candidate:
    asked = (s for s in solvers() if s.ops is None or p.op in s.ops)
    solver = next(s for s in asked if s.language == "c" and s.why_not(p, device.target) is None)
    return solver.id, solver.default(p, device.target)


@pytest.mark.parametrize("name", REAL)
def test_the_default_of_a_real_problem_passes(name: str) -> None:
    device, p = open_device("CPU"), REAL[name]
    with LocalMeasurer(device) as local:
        assert local.pose(p) is None
        found = local.attempt(default(p, device))
        assert found.status is Status.OK, found.why
        assert bench.LEAST_TURNS <= len(found.samples) <= bench.MOST_TURNS and min(found.samples) > 0
        assert found.error < 1e-5 and not found.probed and found.check_seconds > 0
        assert local.regime().kind == "cold" and local.regime().nbytes >= 2 * device.cache_bytes
        race = local.race([default(p, device)] * 2, 3)
        assert not race.fallen and [len(s) for s in race.samples] == [3, 3]


def test_compiling_is_told_apart_from_checking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compile when they are first bound, which is when they are checked."""
    device, p = open_device("CPU"), REAL["softmax"]
    built = type(device).build

    def slow(self: Device, source: str) -> Any:
        time.sleep(0.3)
        return built(self, source)

    monkeypatch.setattr(type(device), "build", slow)
    with LocalMeasurer(device) as local:
        assert local.pose(p) is None
        found = local.attempt(default(p, device))
        assert found.status is Status.OK, found.why
        assert found.compile_seconds >= 0.3 and found.check_seconds > 0


@pytest.mark.parametrize("name", ["conv", "softmax"])
def test_a_turn_is_one_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One table with a row for each execution: else what is timed would be calls from Python."""
    device, p = open_device("CPU"), REAL[name]
    assert device.family == "native"
    monkeypatch.setattr(bench, "TURN", 0.05)  # several executions each, also where others use the machine
    launches: list[int] = []
    counts: list[int] = []
    turn = LocalMeasurer._turn

    def counted(self: LocalMeasurer, binding: bench.Binding, count: int) -> float:
        before = self._queue.launches
        seconds = turn(self, binding, count)
        launches.append(self._queue.launches - before)
        counts.append(count)
        return seconds

    monkeypatch.setattr(LocalMeasurer, "_turn", counted)
    with LocalMeasurer(device) as local:
        assert local.pose(p) is None
        found = local.attempt(default(p, device))
        assert found.status is Status.OK, found.why
        assert max(counts) > 1 and set(launches) == {1}
        # every slot's arguments are its own: poison in one's outputs would be seen
        assert local.race([default(p, device)] * 2, 2).fallen == {}


def test_what_is_timed_finds_threads_awake_and_its_cost_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the middle of a network: waking threads and finding out how long a step takes is not the kernel's time."""
    device, p = open_device("CPU"), REAL["conv"]
    seen: list[str] = []
    with LocalMeasurer(device, timing=seen.append) as local:
        assert local.pose(p) is None
        rouse, bind = local._queue.rouse, LaunchTable.bind

        def bound(self: LaunchTable, *given: Any) -> BoundTable:
            made = bind(self, *given)
            if len(given) == 2 and given[1][0] is not None:  # not for the check before it is timed
                seen.append(f"known: {made.costs()[0] > 0}")
                assert len(made.costs()) == len(self.parts) and len(set(made.costs())) == 1
            return made

        monkeypatch.setattr(LaunchTable, "bind", bound)
        local._queue.rouse = lambda: (rouse(), seen.append("awake"))[0]  # type: ignore[method-assign]
        assert local.attempt(default(p, device)).status is Status.OK
    assert {tuple(seen[i : i + 4]) for i in range(0, len(seen), 4)} == {("known: True", "awake", "begin", "end")}


@opencl_runtime.needs_opencl
def test_a_device_with_memory_of_its_own() -> None:
    device, p = opencl_runtime.device(shares_memory=False), REAL["matmul"]
    with LocalMeasurer(device) as local:
        assert local.pose(p) is None
        assert local.attempt(default(p, device)).status is Status.OK
        assert local.attempt(("host.reference", {})).status is Status.FAILED
        assert not local.race([default(p, device)] * 2, 2).fallen


def test_slower_than_the_limit_is_only_probed() -> None:
    device, p = open_device("CPU"), REAL["softmax"]
    with LocalMeasurer(device) as local:
        local.pose(p, regime="warm")
        found = local.attempt(default(p, device), limit=0.0)
        assert found.status is Status.OK and found.probed and len(found.samples) == 1
        assert local.regime() == timing_buffers.Regime("warm", 1, 2 * 12 * 200 * 4)


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        (("opencl.absent", {}), "no solver"),
        (("null.any", {}), "devices that compile null"),
        (("opencl.softmax", {}), "solves"),
        (("opencl.matmul", {"nothing": 1}), "space"),
    ],
)
def test_what_is_refused_fails_and_says_why(candidate: Candidate, says: str) -> None:
    with LocalMeasurer(open_device("CPU")) as local:
        local.pose(REAL["matmul"], regime="warm")
        found = local.attempt(candidate)
        assert found.status is Status.FAILED and says in found.why


def test_what_cannot_be_posed_says_why() -> None:
    with LocalMeasurer(open_device("CPU")) as local:
        assert "static" in (local.pose(problem("Relu", (2, None), out=(2, None))) or "")
        assert "regime" in (local.pose(MATMUL, regime="hot") or "")
        with pytest.raises(RuntimeError, match="posed"):
            local.attempt(("opencl.elementwise", {}))


# ---- candidates in Python, on the host ------------------------------------------------------------------------------

Act = Callable[["Act_", Sequence[Any], Sequence[Any]], None]


class Act_(Kernel):
    """Right, and then does something else; counts its runs and remembers where its data lay."""

    name = "test.act"

    def __init__(self, problem: Problem, act: Any, packed: bool) -> None:
        self.right, self.act, self.runs = HostKernel(problem), act, 0
        self.inputs: list[tuple[int, ...]] = []
        self.outputs: list[int] = []
        self.packings = {1: Packing("as it is", lambda a: np.asarray(a.copy()))} if packed else {}

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        self.runs += 1
        self.inputs.append(tuple(a.ctypes.data for a in inputs))
        self.outputs.append(outputs[0].ctypes.data)
        self.right.run(queue, inputs, outputs)
        self.act(self, inputs, outputs)
        return outputs


class Acting(Solver):
    """Configs are numbers; each does something of its own."""

    id = "test.acting"

    def __init__(self, *acts: Any, packed: bool = False) -> None:
        self.acts, self.packed, self.made = acts, packed, dict[int, Act_]()

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"n": list(range(len(self.acts)))})

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        made = self.made[config["n"]] = Act_(problem, self.acts[config["n"]], self.packed)
        return made


def fine(kernel: Act_, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    pass


def later(run: int, change: Callable[[Sequence[Any], Sequence[Any]], None]) -> Any:
    """Wrong from some run on; the judge takes four."""
    return lambda kernel, i, o: change(i, o) if kernel.runs >= run else None


def wrong(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    outputs[0][1, 3] += 1


def unwritten(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    outputs[0][1, 3] = np.nan


def forgetful(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    outputs[0].view(np.uint8)[...] = 0xFF  # as if nothing had been written


def outside(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    whole = outputs[0].base
    while whole.base is not None and isinstance(whole.base, np.ndarray) and whole.base.dtype == np.uint8:
        whole = whole.base
    end = outputs[0].ctypes.data + outputs[0].nbytes - whole.ctypes.data
    whole[end + 3] = 0


def thief(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    inputs[0][0, 0] += 1


def fails(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    raise MemoryError("no more")


MATMUL = problem("MatMul", (8, 30), (30, 9), out=(8, 9), constant=[1])
HOST = HostDevice("CPU.HOST")


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        (wrong, Status.WRONG, "right at first"),
        (unwritten, Status.WRONG, "right at first"),
        (forgetful, Status.WRONG, "right at first"),
        (outside, Status.WRONG, "out of bounds"),
        (thief, Status.WRONG, "writes to its inputs"),
        (fails, Status.FAILED, "MemoryError: no more"),
    ],
)
@pytest.mark.parametrize("run", [5, 6])
def test_right_at_first_and_wrong_while_timed(change: Any, status: Status, says: str, run: int) -> None:
    solver = Acting(later(run, change), fine)
    with LocalMeasurer(HOST, [solver]) as local:
        local.pose(MATMUL, regime="warm")
        found = local.attempt((solver.id, {"n": 0}))
        assert found.status is status and says in found.why and found.samples == ()
        # what it wrote to is gone: the next candidate is not blamed for it
        assert local.attempt((solver.id, {"n": 1})).status is Status.OK


def test_wrong_before_it_is_timed() -> None:
    solver = Acting(later(1, wrong), later(2, fails), later(1, fails))
    with LocalMeasurer(HOST, [solver]) as local:
        local.pose(MATMUL, regime="warm")
        assert local.attempt((solver.id, {"n": 0})).status is Status.WRONG
        assert [local.attempt((solver.id, {"n": n})).status for n in (1, 2)] == [Status.FAILED] * 2
        assert solver.made[0].runs == 1 and solver.made[2].runs == 1


def test_who_turns_wrong_in_a_race_falls_and_the_others_go_on() -> None:
    solver = Acting(fine, fine)
    with LocalMeasurer(HOST, [solver]) as local:
        local.pose(MATMUL, regime="warm")
        names: list[Candidate] = [(solver.id, {"n": n}) for n in range(2)]
        assert all(local.attempt(c).status is Status.OK for c in names)
        solver.made[1].act = later(solver.made[1].runs + 6, wrong)
        race = local.race([*names, names[0]], 10)
        assert set(race.fallen) == {1} and race.fallen[1].status is Status.WRONG
        assert [len(s) for s in race.samples][::2] == [10, 10] and len(race.samples[1]) < 10
        first = solver.made[1]
        assert not local.race([names[1]], 1).fallen and solver.made[1] is not first  # it was compiled and judged anew


def test_a_large_input_is_looked_at_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CHEAP", 0)
    only_first = problem("Shape", (8, 30), out=TensorType(INT, (2,)))
    solver = Acting(later(5, lambda i, o: i[0].fill(7)))
    with LocalMeasurer(HOST, [solver]) as local:
        local.pose(only_first, regime="warm")
        found = local.attempt((solver.id, {"n": 0}))
        assert found.status is Status.WRONG and "writes to its inputs" in found.why


def test_when_one_of_twins_falls_the_other_is_judged_by_what_it_does() -> None:
    solver = Acting(fine, fine)
    with LocalMeasurer(HOST, [solver]) as local:
        local.pose(MATMUL, regime="warm")
        names: list[Candidate] = [(solver.id, {"n": n}) for n in range(2)]
        assert all(local.attempt(c).status is Status.OK for c in names)
        kernel = solver.made[0]
        once = kernel.runs + 1
        kernel.act = lambda k, i, o: wrong(i, o) if k.runs == once else None
        race = local.race([names[0], names[1], names[0]], 4)
        assert len(race.fallen) == 1 and next(iter(race.fallen)) in (0, 2)
        assert sorted(map(len, race.samples)) == [0, 4, 4]


def test_a_race_attempts_whom_it_does_not_know() -> None:
    solver = Acting(fine, later(1, wrong))
    with LocalMeasurer(HOST, [solver]) as local:
        local.pose(MATMUL, regime="warm")
        race = local.race([(solver.id, {"n": 0}), (solver.id, {"n": 1}), ("test.absent", {})], 4)
        assert len(race.samples[0]) == 4 and race.samples[1:] == ((), ())
        assert race.fallen[1].status is Status.WRONG and race.fallen[2].status is Status.FAILED


# ---- the ring -------------------------------------------------------------------------------------------------------


def test_executions_rotate_through_the_ring() -> None:
    device = HostDevice("CPU.HOST")
    device.cache_bytes = 16 << 10
    solver = Acting(fine, fine)
    with LocalMeasurer(device, [solver]) as local:
        local.pose(MATMUL)
        regime = local.regime()
        slot = (8 * 30 + 30 * 9 + 8 * 9) * 4
        assert regime == timing_buffers.Regime("cold", -(-(32 << 10) // slot), regime.copies * slot)
        for n in range(2):
            assert local.attempt((solver.id, {"n": n})).status is Status.OK
        first, second = solver.made[0], solver.made[1]
        timed = first.outputs[4:]  # behind the judge's
        assert len(set(timed)) == regime.copies
        for revolution in (timed[i : i + regime.copies] for i in range(0, len(timed) - regime.copies, regime.copies)):
            assert len(set(revolution)) == regime.copies  # nobody comes twice before all were there
        for at in range(2):
            assert len({addresses[at] for addresses in first.inputs[4:]}) == regime.copies
        # the next candidate goes on where the other one stopped
        order = list(dict.fromkeys(timed))
        assert second.outputs[4] == order[(order.index(timed[-1]) + 1) % len(order)]


def test_twins_have_packed_weights_of_their_own_and_other_candidates_share_them() -> None:
    solver = Acting(fine, fine, packed=True)
    with LocalMeasurer(HOST, [solver]) as local:
        local.pose(MATMUL, regime="warm")
        one, other = ((solver.id, {"n": n}) for n in range(2))
        assert not local.race([one, one, other], 3).fallen
        assert len({addresses[1] for addresses in solver.made[0].inputs[4:]}) == 2
        assert {a[1] for a in solver.made[1].inputs[4:]} < {a[1] for a in solver.made[0].inputs[4:]}
        assert len({addresses[0] for addresses in solver.made[0].inputs[4:]}) == 1


def test_a_tiny_problem_sweeps_the_caches_and_never_wraps_within_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[int] = []
    monkeypatch.setattr(timing_buffers.Sweeper, "__call__", lambda self: swept.append(1))
    tiny = problem("Relu", (4,), out=(4,))
    solver = Acting(fine)
    with LocalMeasurer(HOST, [solver]) as local:
        local.pose(tiny)
        regime = local.regime()
        assert regime.copies == timing_buffers.MOST_SLOTS and regime.nbytes == 2 * HOST.cache_bytes
        assert local.attempt((solver.id, {"n": 0})).status is Status.OK
        before = len(swept)
        made = local._made()
        made.position = 100
        for _ in range(5):
            slots = made.take(200)
            assert slots == sorted(slots)  # 256 slots: each turn begins anew
        assert len(swept) == before + 5


def test_large_problems_have_two_copies_at_least_and_memory_is_bounded() -> None:
    assert timing_buffers._slots(10**9, 64 << 20, 16e9) == 2
    assert timing_buffers._slots(10**6, 64 << 20, 16e9) == 68
    assert timing_buffers._slots(10**6, 64 << 20, 40e6) == 10
    assert timing_buffers._slots(1, 64 << 20, 16e9) == timing_buffers.MOST_SLOTS
    with LocalMeasurer(HOST, [Acting(fine)]) as local:
        local.pose(MATMUL)
        with pytest.raises(MemoryError, match="copies for timing"):
            local._made().reserve(1 << 60)


def test_bindings_that_were_not_used_for_long_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MOST_BOUND", 3)
    solver = Acting(*[fine] * 6, packed=True)
    with LocalMeasurer(HOST, [solver]) as local:
        local.pose(MATMUL, regime="warm")
        for n in range(6):
            assert local.attempt((solver.id, {"n": n})).status is Status.OK
        assert [bool(e.bindings) for e in local._entries.values()] == [False] * 3 + [True] * 3
        names: list[Candidate] = [(solver.id, {"n": n}) for n in range(6)]
        assert not local.race(names, 2).fallen  # all that race are kept
        assert local.attempt(names[0]).status is Status.OK


def test_the_hook_is_told_of_timed_stretches() -> None:
    told: list[str] = []
    solver = Acting(fine)
    with LocalMeasurer(HOST, [solver], timing=told.append) as local:
        local.pose(MATMUL, regime="warm")
        found = local.attempt((solver.id, {"n": 0}))
        assert told == ["begin", "end"] * (len(found.samples) + 2)
        assert local.timed >= sum(found.samples)


def test_sizes_of_caches_and_memory_are_sane() -> None:
    assert 1 << 18 <= cache_bytes() <= 1 << 34
    free = free_bytes()
    assert free is None or 0 < free <= (HOST.memory_bytes or free)


def test_the_floor_is_far_below_what_hardware_can_do() -> None:
    target = HOST.target
    x, w = TensorType(F, (1, 64, 56, 56)), TensorType(F, (64, 64, 3, 3))
    seconds = floor(problem("Conv", x, w, out=x, pads=(1, 1, 1, 1)), target)
    flops = 2 * 576 * x.size
    assert flops / seconds == pytest.approx(target.units * 16 * 4 * 6e9 * 16)
    assert floor(problem("Gather", (1 << 20, 64), TensorType(INT, (1,)), out=(1, 64), axis=0), target) < 1e-8


def test_sweeping_reads_pages_of_its_own() -> None:
    """Memory that was never written to is one page of zeros, and would push nothing out."""
    queue = HOST.queue()
    sweeper = timing_buffers.Sweeper(HOST, queue, 1 << 20)
    assert sum(part.nbytes for part in sweeper.parts) >= 1 << 20 and all(part.all() for part in sweeper.parts)
    sweeper()
