"""Check and time candidates in this process (`LocalMeasurer`). A worker uses it for its measurements.

A *turn* executes a kernel back to back on successive slots of a ring of copies (`ring`). It reads the queue's clock
before and after. Outputs are poisoned beforehand, and results are checked after every turn, outside the timed stretch.
A candidate whose results then differ from those that the judge found right is discarded.
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

from ..devices import build_options
from ..devices.base import Device, Target
from ..devices.executable import Executable, HostCall, Part
from ..errors import TunewrightError
from ..ir.types import DType, TensorType
from ..ops import lookup
from ..search.base import Status
from ..search.space import Config
from ..solvers.base import Array, Kernel, Problem, Solver, solvers
from .base import Attempt, Candidate, Measurer, Race, Regime
from .judge import POISONS, Guarded, Judge, same
from .request_activity import ActivityGate, TimedSample
from .timing_buffers import KINDS, BufferCopies, Ring, views

#: Target length of a turn in seconds: long compared with the clock's resolution and a launch, short compared with the
#: time between disturbances.
TURN = 0.5e-3
#: Minimum and maximum number of turns of an attempt, and the seconds after which no further turn begins.
LEAST_TURNS, MOST_TURNS, ENOUGH = 3, 9, 30e-3
#: Inputs of up to this number of bytes are compared after every turn, larger ones only at the end.
CHEAP = 4 << 20
#: Speed that no hardware exceeds: cycles per second (`Traits.bytes_per_clock` says how many bytes in each). A kernel
#: may need only a 16th of the arithmetic that the operation's definition counts (fast algorithms, masks).
CLOCK, FAST = 6e9, 16
#: Number of candidates whose launches and packed weights are kept, if memory allows.
MOST_BOUND = 32
#: Linked launches kept per candidate; they differ in the number of executions.
MOST_LINKED = 4


class RefusedCandidate(Exception):
    """Raised for a candidate that may not even be compiled."""


class Faulty(Exception):
    """Raised when a candidate that passed its check gives wrong results while it is timed."""


class Broke(Exception):
    """Raised when a candidate broke the device: this process cannot use the device any more."""


@dataclass
class Binding:
    """A kernel with the inputs and outputs of each slot."""

    kernel: Kernel
    copies: list[BufferCopies | None]
    slots: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    #: see `Kernel`
    like: DType | None = None
    #: results that matched the reference, by output number; equal ones need no further comparison
    right: dict[int, Array] = field(default_factory=dict)
    #: large results kept in the device's memory, by output buffer; equal ones need not be fetched
    there: dict[int, Any] = field(default_factory=dict)
    #: by the number of executions; kept because writing a launch takes longer than running it
    linked: dict[int, Executable] = field(default_factory=dict)


@dataclass
class CorrectCandidate:
    """A candidate whose results were right."""

    kernel: Kernel
    attempt: Attempt
    #: median of its samples
    seconds: float = math.inf
    #: while True its bindings must be kept
    racing: bool = False
    #: by number; in a race against itself the candidate's second row has its own binding
    bindings: dict[int, Binding] = field(default_factory=dict)


class LocalMeasurer(Measurer):
    """Measures in this process, on one queue of one device.

    ``clock`` times compilation and checks; kernels are timed by the device's queue. ``timing`` is called with "begin"
    and "end" around every timed stretch; ``timed`` is the sum of these stretches. With a ``gate`` nothing is timed
    while a request runs, and a turn in which a request begins is repeated. ``waiting`` is called from time to time
    during the wait.

    Methods raise `Broke` when a candidate has broken the device. The object must not be used afterwards.
    """

    def __init__(
        self,
        device: Device,
        solvers: Sequence[Solver] | None = None,
        clock: Callable[[], float] | None = None,
        timing: Callable[[str], None] | None = None,
        gate: ActivityGate | None = None,
        waiting: Callable[[], object] = lambda: None,
    ) -> None:
        self.device, self.timing, self.timed = device, timing, 0.0
        self._gate, self._waiting = gate, waiting
        self._solvers = {s.id: s for s in (_all_solvers() if solvers is None else solvers)}
        self._clock = clock or time.perf_counter
        self._queue = device.queue()
        self._judge: Judge | None = None
        self._ring: Ring | None = None
        #: candidates of the posed problem that were right; the least recently used comes first
        self._entries: dict[tuple[str, Config], CorrectCandidate] = {}
        self._rng = np.random.default_rng(0)
        self._kind, self._seed = "cold", 0

    # ---- the problem -------------------------------------------------------------------------------------------------

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
        self._start_afresh()  # a queue keeps the kernels of problems that it served
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

    # ---- one candidate -----------------------------------------------------------------------------------------------

    def attempt(self, candidate: Candidate, limit: float = math.inf) -> Attempt:
        entry = self._entry(candidate)
        if isinstance(entry, Attempt):
            return entry
        try:
            binding = self._bind(entry, 0)
            estimate = self._turn(binding, 1)  # a first execution, which may allocate or compile, does not count
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

    def _entry(self, candidate: Candidate) -> CorrectCandidate | Attempt:
        """Return the candidate, compiled and checked; or the attempt that says why it failed."""
        judge = self.judge
        key = candidate[0], Config(candidate[1])
        known = self._entries.pop(key, None)
        if known is not None:
            self._entries[key] = known  # move it to the end: most recently used
            return known
        start = self._clock()
        try:
            kernel = compile_candidate(candidate, judge.problem, self.device, self._solvers)
        except Exception as error:
            return Attempt(Status.FAILED, _words(error), compile_seconds=self._clock() - start)
        compiled, waited = self._clock(), build_options.waited()
        try:
            verdict = judge.check(kernel, self._queue)
        except Exception as error:
            status, why, error_found = Status.FAILED, self._failed(error), 0.0
            self._start_afresh()
        else:
            status, why, error_found = Status.WRONG if verdict.wrong else Status.OK, verdict.wrong, verdict.error
        checked, waited = self._clock() - compiled, build_options.waited() - waited
        built = min(waited, checked)  # kernels compile when they are first bound, and that happens in the check
        attempt = Attempt(
            status, why, error=error_found, compile_seconds=compiled - start + built, check_seconds=checked - built
        )
        if status is not Status.OK:
            return attempt
        entry = self._entries[key] = CorrectCandidate(kernel, attempt)
        return entry

    def _failed(self, error: Exception) -> str:
        """Describe an error of a candidate. Raises `Broke` if the device is broken."""
        broken = self.device.broken()
        if broken:
            raise Broke(f"it broke the device: {broken}") from error
        return _words(error)

    def _out(self, candidate: Candidate, entry: CorrectCandidate, status: Status, why: str) -> Attempt:
        """Remove a candidate and return its attempt with the status and the reason."""
        self._entries.pop((candidate[0], Config(candidate[1])), None)
        entry.bindings.clear()
        self._start_afresh()
        return replace(entry.attempt, status=status, why=why, samples=(), probed=False)

    def _start_afresh(self) -> None:
        """Replace the queue and the ring: a candidate may have broken the queue and written to the ring."""
        with suppress(Exception):
            self._queue.finish()
        self._queue, self._ring = self.device.queue(), None
        for entry in self._entries.values():
            entry.bindings.clear()

    # ---- several candidates ------------------------------------------------------------------------------------------

    def race(self, candidates: Sequence[Candidate], rounds: int) -> Race:
        fallen: dict[int, Attempt] = {}
        entries: dict[int, CorrectCandidate] = {}
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
        for lap in range(rounds + 1):  # the first round warms up
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

    def _raced(self, candidate: Candidate) -> CorrectCandidate | Attempt:
        """Return the entry of a candidate. One that has not been attempted yet is attempted now."""
        entry = self._entry(candidate)
        if isinstance(entry, CorrectCandidate) and entry.seconds == math.inf:
            attempt = self.attempt(candidate)
            return entry if attempt.status is Status.OK else attempt
        return entry

    # ---- turns -------------------------------------------------------------------------------------------------------

    def _bind(self, entry: CorrectCandidate, number: int) -> Binding:
        found = entry.bindings.get(number)
        if found is None:
            ring = self._made()
            self._make_room(ring)
            copies = ring.inputs(entry.kernel, number)
            outs = [[out.view for out in slot] for slot in ring.outputs]
            there = [(views(copies, s), outs[s]) for s in range(ring.slots)]
            found = entry.bindings[number] = Binding(entry.kernel, copies, there, entry.kernel.like)
            ring.sweep()  # data just written is still in the caches
        return found

    def _make_room(self, ring: Ring) -> None:
        """Drop the least recently used bindings while there are too many or memory is short."""
        bound = [e for e in self._entries.values() if e.bindings and not e.racing]
        while bound and (len(bound) >= MOST_BOUND or not ring.has_room()):
            bound.pop(0).bindings.clear()

    def _count(self, seconds: float) -> int:
        """Return the number of executions per turn for a kernel that takes ``seconds``."""
        most = self._made().most()
        return most if seconds * most <= TURN else min(max(round(TURN / seconds), 1), most)

    def _turn(self, binding: Binding, count: int) -> float:
        """Time one turn and return seconds per execution. Raises `Faulty` for impossible times and changed results."""
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
        """Return a function that executes the kernel on each slot; a single launch if the device links kernels."""
        parts, memory = list[Part](), list[Any]()
        for slot in slots:
            inputs, outputs = binding.slots[slot]
            numbers = range(len(memory), len(memory) + len(inputs) + len(outputs))
            parts.append(Part(binding.kernel, tuple(numbers[: len(inputs)]), tuple(numbers[len(inputs) :])))
            memory += [*inputs, *outputs]
        if not binding.kernel.is_linkable:
            bounds = [HostCall(part).bind(self._queue, memory) for part in parts]
            return lambda: [bound.invoke({}) for bound in bounds]
        linked = binding.linked.pop(len(parts), None) or self.device.link(parts)
        binding.linked[len(parts)] = linked  # move it to the end: most recently used
        if len(binding.linked) > MOST_LINKED:
            del binding.linked[next(iter(binding.linked))]
        bound = linked.bind(self._queue, memory)
        bound.prepare()
        return lambda: bound.invoke({})

    def _timed(self, run: Callable[[], object]) -> float | None:
        """Return the seconds that ``run`` takes; None if a request began meanwhile, which makes the time useless."""
        queue = self._queue
        queue.finish()  # poison may still be in transfer to a device with its own memory
        if self._gate is not None:
            self._gate.wait(self._waiting)
        queue.rouse()  # may take long where clocks are compared, so it happens before the timed stretch
        with self._gate.sample() if self._gate is not None else nullcontext(TimedSample()) as sample:
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
        """Raise `Faulty` if the last execution on a slot gave wrong results or wrote to its inputs."""
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
        """Whether an output still holds the right bytes, as far as the device can tell without a transfer."""
        if not self._queue.compares:
            return False
        if id(out) in binding.there:
            return self._queue.equal(out.buffer, binding.there[id(out)])
        judged = self.judge.right(self._queue, n, out.buffer)
        if judged is not None:
            binding.there[id(out)] = judged
        return judged is not None

    def _is_kept(self, out: Guarded) -> bool:
        """Whether a copy of a result stays in the device's memory: the result is large, and all copies fit."""
        copies, memory = MOST_BOUND * len(self._made().outputs), self.device.memory_bytes
        fits = memory is None or copies * out.type.nbytes <= memory / 8
        return self._queue.compares and out.type.nbytes > CHEAP and fits

    def _check_inputs(self, binding: Binding, slot: int, most: float) -> None:
        """Raise `Faulty` if an input of up to ``most`` bytes has changed."""
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
    """Compile a candidate into a kernel.

    Raises `RefusedCandidate` if the solver does not accept it. ``known``: the solvers by id; all of them by default.
    """
    id, config = candidate
    target = device.target
    solver = ({s.id: s for s in _all_solvers()} if known is None else known).get(id)
    if solver is None:
        raise RefusedCandidate(f"there is no solver {id}")
    if solver.language not in (None, target.language):
        raise RefusedCandidate(f"{id} is for devices that compile {solver.language}")
    if solver.host and not device.shares_memory:
        raise RefusedCandidate(f"{id} runs on the host")
    why = solver.why_not(problem, target)
    if why is not None:
        raise RefusedCandidate(f"{id}: {why}")
    if config not in solver.space(problem, target):
        raise RefusedCandidate(f"{dict(config)} is not in the space of {id}")
    return solver.compile(problem, config, device)


def floor(problem: Problem, target: Target) -> float:
    """Return the minimum seconds that one execution can take on the fastest hardware that fits this target."""
    spec = lookup(problem.op)
    outputs = [t for t in problem.outputs if isinstance(t, TensorType)]
    if spec is None or not outputs:
        return 0.0
    main = [t if isinstance(t, TensorType) else None for t in problem.main_inputs]
    flops = spec.work(main, outputs, problem.attrs).flops / FAST
    if any(int(problem.attrs.get(side, -1)) >= 0 for side in ("left_window_size", "right_window_size")):
        flops = 0.0  # attention with a window may skip most of the counted work
    width = target.traits.bytes_per_clock * max(target.units, 1)
    narrow = min(t.dtype.itemsize for t in [*main, *outputs] if t is not None)
    arithmetic = flops / (width / narrow * 2 * 2 * CLOCK)  # two units, two operations each
    traffic = sum(t.nbytes for t in outputs) / (width * CLOCK)
    return max(arithmetic, traffic)


def _all_solvers() -> Sequence[Solver]:
    return solvers()


def _words(error: Exception) -> str:
    if isinstance(error, RefusedCandidate | TunewrightError):
        return str(error)
    return f"{type(error).__name__}: {error}"
