"""Checks and times candidates in this process: `Local`. Inside a worker it is what does the measuring.

A *turn* executes a kernel back to back on successive slots of a ring of copies (`ring`), and reads the queue's clock
before and after. Results are looked at after every turn, off the clock: outputs were poisoned, and hold what the judge
found right, or the candidate is out.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from ..devices import building
from ..devices.base import Device, Target
from ..devices.executable import Call, Executable, Part
from ..errors import TunewrightError
from ..ir.types import DType, TensorType
from ..ops import lookup
from ..search.base import Status
from ..search.space import Config
from ..solvers.base import Array, Kernel, Problem, Solver, solvers
from .activity import Gate, Sample
from .judge import POISONS, Guarded, Judge, same
from .measure import Attempt, Candidate, Measurer, Race, Regime
from .ring import KINDS, Copies, Ring, views

#: how long a turn should last, in seconds: long beside the clock's resolution and a launch, short beside disturbances
TURN = 0.5e-3
#: turns of an attempt, and how long they may take together
LEAST_TURNS, MOST_TURNS, ENOUGH = 3, 9, 30e-3
#: inputs up to this number of bytes are compared after every turn, larger ones at the end
CHEAP = 4 << 20
#: The roofline that no kernel is above: cycles per second, and bytes that a core or a GPU's unit works on in one. A
#: kernel may need a 16th of the arithmetic that the operation's definition counts (fast algorithms, masks).
CLOCK, CORE_BYTES, GPU_BYTES, FAST = 6e9, 64, 4096, 16
#: candidates whose launches and packed weights are kept, where memory allows
MOST_BOUND = 32
#: launches of a candidate that are kept, which differ in the number of executions
MOST_LINKED = 4


class Refused(Exception):
    """A candidate that is not even compiled."""


class Faulty(Exception):
    """A candidate that was right turned out wrong while it was timed."""


class Broke(Exception):
    """A candidate broke the device: this process cannot use it any more."""


@dataclass
class Binding:
    """A kernel with its inputs and outputs, those of each slot."""

    kernel: Kernel
    copies: list[Copies | None]
    slots: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    #: see `Kernel`
    like: DType | None = None
    #: results that were compared with the reference: equal ones need no further comparison
    right: dict[int, Array] = field(default_factory=dict)
    #: large ones as they lie in the device's memory, by their place: equal ones need not even be fetched
    there: dict[int, Any] = field(default_factory=dict)
    #: by the number of executions: writing a launch takes longer than running it
    linked: dict[int, Executable] = field(default_factory=dict)


@dataclass
class Entry:
    """A candidate that was found right."""

    kernel: Kernel
    attempt: Attempt
    #: median of its samples
    seconds: float = math.inf
    #: its bindings are needed until the race is over
    racing: bool = False
    #: by number: a second one is the candidate's twin in a race against itself
    bindings: dict[int, Binding] = field(default_factory=dict)


class Local(Measurer):
    """Measures in this process, on one queue of one device.

    ``clock`` tells how long compiling and checking take; times of kernels are those of the device's queue. ``timing``
    is called with "begin" and "end" around every timed stretch; ``timed`` is the sum of what they claim to have taken.
    Behind a ``gate`` nothing is timed while a request runs, and a turn in which one begins is repeated; ``waiting`` is
    called now and then while it waits.
    What is asked of it raises `Broke` when a candidate has broken the device: nobody is to use it again.
    """

    def __init__(
        self,
        device: Device,
        solvers: Sequence[Solver] | None = None,
        clock: Callable[[], float] | None = None,
        timing: Callable[[str], None] | None = None,
        gate: Gate | None = None,
        waiting: Callable[[], object] = lambda: None,
    ) -> None:
        self.device, self.timing, self.timed = device, timing, 0.0
        self._gate, self._waiting = gate, waiting
        self._solvers = {s.id: s for s in (_all_solvers() if solvers is None else solvers)}
        self._clock = clock or time.perf_counter
        self._queue = device.queue()
        self._judge: Judge | None = None
        self._ring: Ring | None = None
        #: candidates of the posed problem that were right, the least recently used first
        self._entries: dict[tuple[str, Config], Entry] = {}
        self._rng = np.random.default_rng(0)
        self._kind, self._seed = "cold", 0

    # ---- the problem ------------------------------------------------------------------------------------------------

    def pose(self, problem: Problem, seed: int = 0, regime: str = "cold") -> str | None:
        self.close()
        judge = Judge(problem, self.device, seed)
        why = judge.unfit if regime in KINDS else f"there is no regime {regime!r}"
        if why is not None:
            return why
        self._judge, self._kind, self._seed = judge, regime, seed
        self._rng = np.random.default_rng(seed)
        self._floor = floor(problem, self.device.target)
        try:
            self._made()
        except MemoryError as error:
            self.close()
            return str(error) or "no memory"
        return None

    def regime(self) -> Regime:
        return self._made().regime

    def close(self) -> None:
        self._start_afresh()  # a queue keeps the kernels of the problems that it served
        self._entries.clear()
        self._judge = None

    @property
    def judge(self) -> Judge:
        """The judge of the posed problem."""
        if self._judge is None:
            raise RuntimeError("no problem was posed")
        return self._judge

    def _made(self) -> Ring:
        if self._ring is None:
            j = self.judge
            self._ring = Ring(j.problem, self.device, self._queue, j.cases[0], self._kind, self._seed)
        return self._ring

    # ---- one candidate ----------------------------------------------------------------------------------------------

    def attempt(self, candidate: Candidate, limit: float = math.inf) -> Attempt:
        entry = self._entry(candidate)
        if isinstance(entry, Attempt):
            return entry
        try:
            binding = self._bind(entry, 0)
            estimate = self._turn(binding, 1)  # a first execution: whatever is made then does not count
            probe = self._turn(binding, self._count(estimate))
            entry.seconds = probe
            if probe > limit:
                entry.attempt = replace(entry.attempt, samples=(probe,), probed=True)
                return entry.attempt
            samples: list[float] = []
            count, spent = self._count(probe), 0.0
            while len(samples) < LEAST_TURNS or (len(samples) < MOST_TURNS and spent < ENOUGH):
                samples.append(self._turn(binding, count))
                spent += samples[-1] * count
            self._check_inputs(binding, self._made().position - 1, math.inf)
        except Faulty as fault:
            return self._out(candidate, entry, Status.WRONG, str(fault))
        except Exception as error:  # a candidate may fail in any way
            return self._out(candidate, entry, Status.FAILED, self._failed(error))
        entry.seconds = median(samples)
        entry.attempt = replace(entry.attempt, samples=tuple(samples), probed=False)
        return entry.attempt

    def _entry(self, candidate: Candidate) -> Entry | Attempt:
        """The candidate, compiled and found right; or what became of it."""
        judge = self.judge
        key = candidate[0], Config(candidate[1])
        known = self._entries.pop(key, None)
        if known is not None:
            self._entries[key] = known  # used last
            return known
        start = self._clock()
        try:
            kernel = compile_candidate(candidate, judge.problem, self.device, self._solvers)
        except Exception as error:
            return Attempt(Status.FAILED, _words(error), compile_seconds=self._clock() - start)
        compiled, waited = self._clock(), building.waited()
        try:
            verdict = judge.check(kernel, self._queue)
        except Exception as error:
            status, why, error_found = Status.FAILED, self._failed(error), 0.0
            self._start_afresh()
        else:
            status, why, error_found = Status.WRONG if verdict.wrong else Status.OK, verdict.wrong, verdict.error
        checked, waited = self._clock() - compiled, building.waited() - waited
        built = min(waited, checked)  # kernels compile when they are first bound, which is to be checked
        attempt = Attempt(
            status, why, error=error_found, compile_seconds=compiled - start + built, check_seconds=checked - built
        )
        if status is not Status.OK:
            return attempt
        entry = self._entries[key] = Entry(kernel, attempt)
        return entry

    def _failed(self, error: Exception) -> str:
        """In words, unless it is the end."""
        broken = self.device.broken()
        if broken:
            raise Broke(f"it broke the device: {broken}") from error
        return _words(error)

    def _out(self, candidate: Candidate, entry: Entry, status: Status, why: str) -> Attempt:
        """A candidate leaves."""
        self._entries.pop((candidate[0], Config(candidate[1])), None)
        entry.bindings.clear()
        self._start_afresh()
        return replace(entry.attempt, status=status, why=why, samples=(), probed=False)

    def _start_afresh(self) -> None:
        """Another queue and another ring: a candidate may have broken the one and written to the other."""
        with suppress(Exception):
            self._queue.finish()
        self._queue, self._ring = self.device.queue(), None
        for entry in self._entries.values():
            entry.bindings.clear()

    # ---- several ----------------------------------------------------------------------------------------------------

    def race(self, candidates: Sequence[Candidate], rounds: int) -> Race:
        fallen: dict[int, Attempt] = {}
        entries: dict[int, Entry] = {}
        twins: Counter[tuple[str, Config]] = Counter()
        numbers: list[int] = []
        for i, candidate in enumerate(candidates):
            key = candidate[0], Config(candidate[1])
            numbers.append(twins[key])
            twins[key] += 1
            entry = self._raced(candidate)
            if isinstance(entry, Attempt):
                fallen[i] = entry
            else:
                entries[i], entry.racing = entry, True
        samples: list[list[float]] = [[] for _ in candidates]
        count = self._count(max((e.seconds for e in entries.values()), default=TURN))
        for lap in range(rounds + 1):  # the first one warms up
            for i in self._rng.permutation(sorted(entries)).tolist():
                try:
                    seconds = self._turn(self._bind(entries[i], numbers[i]), count if lap else 1)
                except Faulty as fault:
                    fallen[i] = self._out(candidates[i], entries.pop(i), Status.WRONG, str(fault))
                except Exception as error:
                    fallen[i] = self._out(candidates[i], entries.pop(i), Status.FAILED, self._failed(error))
                else:
                    samples[i] += [seconds] if lap else []
        for entry in entries.values():
            entry.racing = False
        return Race(tuple(tuple(s) for s in samples), fallen)

    def _raced(self, candidate: Candidate) -> Entry | Attempt:
        """A candidate that was attempted; else it is now."""
        entry = self._entry(candidate)
        if isinstance(entry, Entry) and entry.seconds == math.inf:
            attempt = self.attempt(candidate)
            return entry if attempt.status is Status.OK else attempt
        return entry

    # ---- turns ------------------------------------------------------------------------------------------------------

    def _bind(self, entry: Entry, number: int) -> Binding:
        found = entry.bindings.get(number)
        if found is None:
            ring = self._made()
            self._make_room(ring)
            copies = ring.inputs(entry.kernel, number)
            outs = [[out.view for out in slot] for slot in ring.outputs]
            there = [(views(copies, s), outs[s]) for s in range(ring.slots)]
            found = entry.bindings[number] = Binding(entry.kernel, copies, there, entry.kernel.like)
            ring.sweep()  # what was just written is warm
        return found

    def _make_room(self, ring: Ring) -> None:
        """Drop bindings that were not used for long, while there are many or memory is short."""
        bound = [e for e in self._entries.values() if e.bindings and not e.racing]
        while bound and (len(bound) >= MOST_BOUND or not ring.has_room()):
            bound.pop(0).bindings.clear()

    def _count(self, seconds: float) -> int:
        """Executions of a turn."""
        most = self._made().most()
        return most if seconds * most <= TURN else min(max(round(TURN / seconds), 1), most)

    def _turn(self, binding: Binding, count: int) -> float:
        """Seconds per execution. Faulty when that is impossible, or results are not what they were."""
        ring = self._made()
        slots = ring.take(count)
        run = self._linked(binding, slots)
        taken = self._timed(run)
        while taken is None:
            ring.poison(slots)
            taken = self._timed(run)
        seconds = taken / count
        if not (math.isfinite(seconds) and seconds > 0 and seconds >= self._floor):
            least = f", less than {self._floor:.3g}" if math.isfinite(seconds) and seconds > 0 else ""
            raise Faulty(f"impossible time: {seconds:.3g} s for one execution{least}")
        for slot in {slots[-1], slots[int(self._rng.integers(count))]}:
            self._look(binding, slot)
        ring.poison(slots)
        return seconds

    def _linked(self, binding: Binding, slots: Sequence[int]) -> Callable[[], object]:
        """An execution on each of these slots: one launch, where the device links kernels."""
        parts, memory = list[Part](), list[Any]()
        for slot in slots:
            inputs, outputs = binding.slots[slot]
            numbers = range(len(memory), len(memory) + len(inputs) + len(outputs))
            parts.append(Part(binding.kernel, tuple(numbers[: len(inputs)]), tuple(numbers[len(inputs) :])))
            memory += [*inputs, *outputs]
        if not binding.kernel.is_linkable:
            bounds = [Call(part).bind(self._queue, memory) for part in parts]
            return lambda: [bound.invoke({}) for bound in bounds]
        linked = binding.linked.pop(len(parts), None) or self.device.link(parts)
        binding.linked[len(parts)] = linked  # used last
        if len(binding.linked) > MOST_LINKED:
            del binding.linked[next(iter(binding.linked))]
        bound = linked.bind(self._queue, memory)
        bound.prepare()
        return lambda: bound.invoke({})

    def _timed(self, run: Callable[[], object]) -> float | None:
        """Seconds that something takes; None when a request began meanwhile: then they say nothing."""
        queue = self._queue
        queue.finish()  # poison may still be on its way to a device with memory of its own
        if self._gate is not None:
            self._gate.wait(self._waiting)
        queue.rouse()  # takes longer than it may where the clocks are compared
        with self._gate.sample() if self._gate is not None else nullcontext(Sample()) as sample:
            if self.timing is not None:
                self.timing("begin")
            start = queue.now()
            run()
            end = queue.now()
            if self.timing is not None:
                self.timing("end")
        self.timed += end - start
        return None if sample.interrupted else end - start

    def _look(self, binding: Binding, slot: int) -> None:
        """Faulty when the results of the last execution on a slot are wrong, or its inputs were written to."""
        self._check_inputs(binding, slot, CHEAP)
        outs = self._made().outputs[slot]
        unknown = [n for n, out in enumerate(outs) if not self._is_known(binding, n, out)]
        for n, buffer in zip(unknown, self._queue.fetch([outs[n].buffer for n in unknown]), strict=True):
            out = outs[n]
            if not out.is_intact(buffer, POISONS[0]):
                raise Faulty(f"output {n} is written out of bounds while it is timed")
            result, right = out.tensor(buffer), binding.right.get(n)
            if right is None or not same(result, right):
                wrong = self.judge.compare(n, result, binding.like)
                if wrong:
                    raise Faulty(f"output {n} is right at first and wrong later: {wrong}")
                binding.right[n] = result.copy()
            if self._is_kept(out):
                binding.there[id(out)] = self._queue.duplicate(out.buffer)

    def _is_known(self, binding: Binding, n: int, out: Guarded) -> bool:
        """The same bytes lie there as when it was right, and on this device that is seen without fetching them."""
        if not self._queue.compares:
            return False
        if id(out) in binding.there:
            return self._queue.equal(out.buffer, binding.there[id(out)])
        judged = self.judge.right(self._queue, n, out.buffer)
        if judged is not None:
            binding.there[id(out)] = judged
        return judged is not None

    def _is_kept(self, out: Guarded) -> bool:
        """A copy of a result stays in the device's memory: it is large, and memory is larger."""
        copies, memory = MOST_BOUND * len(self._made().outputs), self.device.memory_bytes
        fits = memory is None or copies * out.type.nbytes <= memory / 8
        return self._queue.compares and out.type.nbytes > CHEAP and fits

    def _check_inputs(self, binding: Binding, slot: int, most: float) -> None:
        """Faulty if an input of up to this number of bytes has changed."""
        held = [c for c in binding.copies if c is not None and c.array.nbytes <= most]
        if self._queue.compares:
            intact = all(c.is_intact(self._queue, slot) for c in held)
        else:
            fetched = self._queue.fetch([c.at(slot).buffer for c in held])
            intact = all(same(c.at(slot).tensor(b), c.array) for c, b in zip(held, fetched, strict=True))
        if not intact:
            raise Faulty("it writes to its inputs while it is timed")


def compile_candidate(
    candidate: Candidate, problem: Problem, device: Device, known: Mapping[str, Solver] | None = None
) -> Kernel:
    """The kernel of a candidate; `Refused` when it cannot be one. ``known``: the solvers by id, else all of them."""
    id, config = candidate
    target = device.target
    solver = ({s.id: s for s in _all_solvers()} if known is None else known).get(id)
    if solver is None:
        raise Refused(f"there is no solver {id}")
    if solver.language not in (None, target.language):
        raise Refused(f"{id} is for devices that compile {solver.language}")
    if solver.host and not device.shares_memory:
        raise Refused(f"{id} runs on the host")
    why = solver.why_not(problem, target)
    if why is not None:
        raise Refused(f"{id}: {why}")
    if config not in solver.space(problem, target):
        raise Refused(f"{dict(config)} is not in the space of {id}")
    return solver.compile(problem, config, device)


def floor(problem: Problem, target: Target) -> float:
    """Seconds that one execution takes at least on the fastest hardware that could call itself this target."""
    spec = lookup(problem.op)
    outputs = [t for t in problem.outputs if isinstance(t, TensorType)]
    if spec is None or not outputs:
        return 0.0
    main = [t if isinstance(t, TensorType) else None for t in problem.main_inputs]
    flops = spec.work(main, outputs, problem.attrs).flops / FAST
    if any(int(problem.attrs.get(side, -1)) >= 0 for side in ("left_window_size", "right_window_size")):
        flops = 0.0  # attention may pass over most of what is counted
    width = (GPU_BYTES if target.device == "gpu" else CORE_BYTES) * max(target.units, 1)
    narrow = min(t.dtype.itemsize for t in [*main, *outputs] if t is not None)
    arithmetic = flops / (width / narrow * 2 * 2 * CLOCK)  # two units of two operations each
    traffic = sum(t.nbytes for t in outputs) / (width * CLOCK)
    return max(arithmetic, traffic)


def _all_solvers() -> Sequence[Solver]:
    return solvers()


def _words(error: Exception) -> str:
    if isinstance(error, Refused | TunewrightError):
        return str(error)
    return f"{type(error).__name__}: {error}"
