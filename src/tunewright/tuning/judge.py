"""Judges kernels before their times count: what they compute against the reference, and what they write.

Inputs and outputs lie between guard bands; outputs are poisoned, once with each of two bytes, so an element that is not
written differs between the runs even where it happens to be right. The two runs must agree bit by bit (races), with the
reference within the table of tolerances (`ops.tolerance`), and inputs must be as they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..devices.base import Device, Queue
from ..devices.host import HostQueue, free_bytes
from ..devices.reports import KernelError
from ..errors import TunewrightError
from ..ir.types import DType, TensorType
from ..ops import lookup
from ..ops.fused import from_plain, to_plain
from ..ops.infer import MISTAKES
from ..ops.tolerance import bias, compare, deviation
from ..solvers.base import Array, Kernel, Problem
from ..solvers.host.reference import HostKernel
from ..solvers.steps import coarsest
from . import inputs
from .repeat import repeat

#: bytes on either side of a tensor that nobody may write to
GUARD = 256
#: copies of inputs and results that judging takes at a time
POSED = 6
#: right results of a case that are kept: comparing bits takes a hundredth of comparing numbers, and candidates often
#: agree
MOST_RIGHT = 2
#: what outputs hold before a run: NaN of every float type; then large numbers
POISONS = (0xFF, 0x7F)


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a kernel, in words (empty: nothing), and its largest deviation relative to the result."""

    wrong: str
    error: float = 0.0


#: An operation that quantises what it computes and goes on with it: close to a tie either step is right, and large
#: layers always meet ties. Small ones (by the sum of all their sizes) are judged.
QUANTISED_STATE, MOST_STATE = "com.microsoft::DynamicQuantizeLSTM", 1000


class Guarded:
    """A tensor in a device's memory with guard bands around it."""

    def __init__(self, device: Device, type: TensorType, stagger: int = 0) -> None:
        #: ``stagger`` moves it by this many cache lines, so that tensors of one size do not all lie alike
        self.device, self.type, self.start = device, type, GUARD + 64 * stagger
        self.buffer = device.alloc(self.start + type.nbytes + GUARD)
        self.view = device.view(self.buffer, self.start, type)

    @staticmethod
    def holding(device: Device, queue: Queue, array: Array, stagger: int = 0) -> Guarded:
        """One with a copy of an array of the host."""
        found = Guarded(device, TensorType.of(array), stagger)
        found.poison(queue, POISONS[0])
        queue.put(array, found.view)
        return found

    def twin(self, queue: Queue) -> Guarded:
        """A copy that is made on the device."""
        found = copy(self)
        found.buffer = queue.duplicate(self.buffer)
        found.view = self.device.view(found.buffer, self.start, self.type)
        return found

    def poison(self, queue: Queue, byte: int) -> None:
        """Fill it, bands included."""
        queue.fill(self.buffer, byte)

    def tensor(self, fetched: Array) -> Array:
        """The tensor in what `Queue.fetch` made of the buffer."""
        return np.ndarray(self.type.physical, self.type.dtype.numpy, fetched, self.start)

    def is_intact(self, fetched: Array, byte: int) -> bool:
        """Whether nobody wrote to the bands."""
        end = self.start + self.type.nbytes
        return not ((fetched[: self.start] != byte).any() or (fetched[end:] != byte).any())


@dataclass(frozen=True)
class Right:
    """Results of a kernel that were found right, and how far off they are."""

    results: Sequence[Array]
    error: float
    #: of each run, on a device that compares where things are: buffers with their bands
    buffers: Sequence[Sequence[Any]]

    def agrees(self, results: Sequence[Array]) -> bool:
        return all(same(mine, other) for mine, other in zip(self.results, results, strict=True))

    def is_in(self, queue: Queue, outs: Sequence[Guarded], run: int) -> bool:
        """Whether the same bytes are there, and nothing was written around them."""
        return all(queue.equal(out.buffer, mine) for out, mine in zip(outs, self.buffers[run], strict=True))


@dataclass
class Kept:
    """What judging leaves to kernels that follow on the same inputs: large tensors take longer to copy and to compare
    than to compute."""

    #: the last ones
    right: list[Right] = field(default_factory=list)
    #: inputs on a device that compares where things are, each with a copy: not those that kernels pack
    inputs: dict[int, tuple[Guarded, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Inputs as the problem's layouts hold them, and what the reference makes of them."""

    name: str
    inputs: Sequence[Array | None]
    want: Sequence[Array]
    #: no result is infinite, or no number
    finite: bool


class Judge:
    """Judges kernels of one problem. Inputs and the reference's results are made once, when they are first needed."""

    def __init__(self, problem: Problem, device: Device, seed: int = 0) -> None:
        self.problem, self.device, self.seed = problem, device, seed
        #: by case
        self._kept: dict[str, Kept] = {}

    @cached_property
    def terms(self) -> float:
        """How many summands an element of the result has."""
        return terms(self.problem)

    @cached_property
    def unfit(self) -> str | None:
        """Why the problem cannot be judged; None when it can."""
        for type in [*self.problem.inputs, *self.problem.outputs]:
            if type is not None and not (isinstance(type, TensorType) and type.is_static):
                return f"{type} has no static shape"
            if type is not None and type.dtype is DType.STRING:
                return "its strings are not measured"
        if None in self.problem.outputs:
            return "nothing is known of a result"
        if self.problem.op == QUANTISED_STATE and sum(self.problem.sizes) > MOST_STATE:
            # 2 of 12 random layers of 512 units differed by one step of their state from the reference, rightly so
            return "it rounds its own state: nobody can tell a step of that from a mistake"
        most, needed = free_bytes(), POSED * sum(
            t.nbytes for t in [*self.problem.inputs, *self.problem.outputs] if isinstance(t, TensorType)
        )
        if most is not None and needed > most / 2:
            return f"judging it takes {needed:,} bytes, of {most:,} that are free"
        ops = [self.problem.op, *(step.op for step in self.problem.epilogue)]
        missing = [op for op in ops if lookup(op) is None]
        if missing:
            return f"no definition of {missing[0]}"
        try:
            terms(self.problem)
        except MISTAKES as error:  # a problem from a file may make no sense
            return f"its types do not fit: {error or repr(error)}"
        return None if isinstance(self._random, Case) else self._random

    @property
    def cases(self) -> Sequence[Case]:
        """Random inputs, on which times are taken, then edge cases where the reference takes them."""
        first = self._random
        assert isinstance(first, Case), first
        return [first, *([self._edge] if isinstance(self._edge, Case) else [])]

    @cached_property
    def _random(self) -> Case | str:
        """Random inputs; the tamest ones where the reference does not take those, or makes no numbers of them."""
        found = self._case("random")
        if isinstance(found, Case) and found.finite:
            return found
        tame = self._case("tame")
        return tame if isinstance(tame, Case) else found

    @cached_property
    def _edge(self) -> Case | str:
        """Edge cases, unless sums overflow: where they do depends on their order."""
        found, spec = self._case("edge"), lookup(self.problem.op)
        simple = spec is not None and spec.elementwise and not self.problem.epilogue
        return found if isinstance(found, Case) and (simple or found.finite) else self._case("tame")

    def _case(self, kind: str) -> Case | str:
        rng, few = np.random.default_rng([self.seed, *kind.encode()]), repeat(self.problem)
        problem = self.problem if few is None else few.problem
        try:
            plain = inputs.make(problem, rng, kind)
            given = physical(problem, plain)
            want = HostKernel(problem).run(HostQueue(), given, [None] * len(problem.outputs))
            finite = _is_finite(want)
            if few is not None:
                given = [a if a is None else few.wide(a, at) for a, at in zip(given, few.inputs, strict=True)]
                want = [few.wide(a, at) for a, at in zip(want, few.outputs, strict=True)]
        except (TunewrightError, MemoryError, *MISTAKES) as error:
            return f"the reference refuses {kind} inputs: {error or repr(error)}"
        for n, (array, type) in enumerate(zip(want, self.problem.outputs, strict=True)):
            assert isinstance(type, TensorType)
            if (array.shape, array.dtype) != (type.physical, type.dtype.numpy):
                return f"the reference makes {array.dtype}{list(array.shape)} of output {n}, not {type}"
        return Case(kind, given, want, finite)

    def check(self, kernel: Kernel, queue: Queue) -> Verdict:
        """What is wrong with the kernel on any of the cases."""
        error = 0.0
        for case in self.cases:
            kept = self._kept.setdefault(case.name, Kept())
            verdict = examine(kernel, self.problem, self.device, queue, case.inputs, case.want, self.terms, kept)
            error = max(error, verdict.error)
            if verdict.wrong:
                self._kept.clear()  # it may have written anywhere
                return Verdict(f"{case.name} inputs: {verdict.wrong}", error)
        return Verdict("", error)

    def right(self, queue: Queue, n: int, buffer: Any) -> Any | None:
        """What was right as output n for the random inputs and is the same as a buffer, byte by byte, on a device that
        compares where things are; its first poison is around both."""
        known = self._kept.get(self.cases[0].name, Kept()).right
        return next((r.buffers[0][n] for r in known if r.buffers[0] and queue.equal(buffer, r.buffers[0][n])), None)

    def compare(self, n: int, array: Array, like: DType | None = None) -> str:
        """How output n differs from the reference's result for the random inputs; empty: it does not.

        ``like``: see `Kernel`.
        """
        type = self.problem.outputs[n]
        like = like or coarsest(self.problem)
        return compare(_meant(array, type), _meant(self.cases[0].want[n], type), self.terms, like)


def examine(
    kernel: Kernel,
    problem: Problem,
    device: Device,
    queue: Queue,
    given: Sequence[Array | None],
    want: Sequence[Array],
    terms: float = 1,
    kept: Kept | None = None,
) -> Verdict:
    """What is wrong with a kernel on inputs that lie as the problem's layouts say.

    ``kept``: what others left that were right, bit by bit; what this one makes is added, if it is right.
    """
    kept = Kept() if kept is None else kept
    given = pack(kernel, problem, given)
    there = [_placed(i, a, kernel, device, queue, kept.inputs) for i, a in enumerate(given)]
    error, before, known = 0.0, None, None
    buffers: list[list[Any]] = []
    like = kernel.like or coarsest(problem)
    for run, poison in enumerate(POISONS):
        outs = [Guarded(device, _tensor(t)) for t in problem.outputs]
        for out in outs:
            out.poison(queue, poison)
        try:
            kernel.run(queue, [None if p is None else p[0].view for p in there], [out.view for out in outs])
            if queue.watching:
                queue.check()
        except KernelError as reported:
            return Verdict(f"run {run + 1}: it reports that {reported.what}", error)
        if queue.compares and not run:
            known = next((r for r in kept.right if r.is_in(queue, outs, run)), None)
        if queue.compares and known is not None and known.is_in(queue, outs, run):
            before, error = known.results, known.error
        else:
            results: list[Array] = []
            for n, (out, buffer) in enumerate(zip(outs, queue.fetch([out.buffer for out in outs]), strict=True)):
                if not out.is_intact(buffer, poison):
                    return Verdict(f"output {n}, run {run + 1}, is written out of bounds", error)
                results.append(_meant(out.tensor(buffer), out.type))
            if before is None:
                known = next((r for r in kept.right if r.agrees(results)), None) if not queue.compares else None
                error = known.error if known is not None else 0.0
            for n, result in enumerate(results):
                if same(result, before[n]) if before is not None else known is not None:
                    continue
                wanted = _meant(want[n], problem.outputs[n])
                error = max(error, deviation(result, wanted))
                wrong = _odd(result) or compare(result, wanted, terms, like) or bias(result, wanted)
                if wrong:
                    return Verdict(f"output {n}, run {run + 1}: {wrong}", error)
                if before is not None:
                    return Verdict(f"output {n} differs between two runs on the same inputs", error)
            before = results
        if (at := _written(queue, there, given)) is not None:
            return Verdict(f"it writes to its input {at}", error)
        buffers.append([out.buffer for out in outs] if queue.compares else [])
    if known is None and before is not None and kernel.like is None:
        kept.right[:] = [*kept.right, Right(before, error, buffers)][-MOST_RIGHT:]
    return Verdict("", error)


def _placed(
    at: int, array: Array | None, kernel: Kernel, device: Device, queue: Queue, kept: dict[int, tuple[Guarded, Any]]
) -> tuple[Guarded, Any] | None:
    """An input on the device, and a copy there, to compare it with, if the device does that."""
    if array is None or (at in kept and at not in kernel.packings):
        return kept.get(at)
    guarded = Guarded.holding(device, queue, array)
    placed = guarded, queue.duplicate(guarded.buffer) if queue.compares else None
    if queue.compares and at not in kernel.packings:
        kept[at] = placed
    return placed


def _written(
    queue: Queue, there: Sequence[tuple[Guarded, Any] | None], given: Sequence[Array | None]
) -> int | None:
    """The first input that is not as it was, bands included; None: all are."""
    held = [(at, *p, a) for at, (p, a) in enumerate(zip(there, given, strict=True)) if p is not None and a is not None]
    if queue.compares:
        return next((at for at, g, before, _ in held if not queue.equal(g.buffer, before)), None)
    for (at, g, _, a), buffer in zip(held, queue.fetch([g.buffer for _, g, _, _ in held]), strict=True):
        if not g.is_intact(buffer, POISONS[0]) or not same(g.tensor(buffer), a):
            return at
    return None


def _meant(array: Array, type: object) -> Array:
    """The elements that count, in any order: not those that fill up a last block."""
    blocked = isinstance(type, TensorType) and type.layout.name == "blocked"
    return to_plain(array, _tensor(type)) if blocked else array


def physical(problem: Problem, plain: Sequence[Array | None]) -> list[Array | None]:
    """Logical arrays as the problem's layouts hold them; lanes that fill up a last block hold what nobody may read."""
    found = []
    for array, type in zip(plain, problem.inputs, strict=True):
        lies = None if array is None else from_plain(array, type)
        if lies is not None and isinstance(type, TensorType) and type.layout.name == "blocked":
            filled = type.dims[1] % type.layout.block
            if filled:
                lies[:, -1, ..., filled:].view(np.uint8)[...] = POISONS[0]
        found.append(lies)
    return found


def pack(kernel: Kernel, problem: Problem, given: Sequence[Array | None]) -> list[Array | None]:
    """Inputs with the constants rearranged as the kernel wants them."""
    packed = list(given)
    for i, packing in kernel.packings.items():
        array = packed[i]
        assert array is not None and problem.constant[i]
        packed[i] = packing.pack(array)
    return packed


def terms(problem: Problem) -> float:
    """How many summands an element of the result has: about half of the arithmetic that it takes."""
    spec = lookup(problem.op)
    outputs = [t for t in problem.outputs if isinstance(t, TensorType)]
    size = sum(t.size for t in outputs)
    if spec is None or not size:
        return 1.0
    main = [t if isinstance(t, TensorType) else None for t in problem.main_inputs]
    count = spec.work(main, outputs, problem.attrs).flops / size / 2
    return max(count, _row(problem, outputs[0].dims), 1.0)


def _row(problem: Problem, dims: tuple[int, ...]) -> float:
    """How many elements are summed up to scale each of them; 0 for operations that do not."""
    name, attrs = problem.op.rpartition("::")[2], problem.attrs
    if name.endswith(("LayerNormalization", "RMSNormalization")):
        return float(math.prod(dims[int(attrs.get("axis", -1)) :]))
    if name in ("Softmax", "LogSoftmax", "LpNormalization"):
        return float(dims[int(attrs.get("axis", -1))]) if dims else 1.0
    if name in ("InstanceNormalization", "GroupNormalization"):
        return math.prod(dims[2:]) * (dims[1] / int(attrs.get("num_groups", dims[1])))
    return math.prod(dims) / dims[1] if name == "MeanVarianceNormalization" else 0.0


def _tensor(type: object) -> TensorType:
    assert isinstance(type, TensorType)
    return type


def same(a: Array, b: Array) -> bool:
    """Whether two results are equal, bit by bit."""
    return a.shape == b.shape and np.array_equal(_bytes(a), _bytes(b))


def _bytes(array: Array) -> Array:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint64 if flat.nbytes % 8 == 0 else np.uint8)


def _odd(array: Array) -> str:
    """A truth value is 0 or 1."""
    return "a truth value is neither 0 nor 1" if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any() else ""


def _is_finite(arrays: Sequence[Array]) -> bool:
    with np.errstate(all="ignore"):
        return all(np.isfinite(a.astype(np.float64)).all() for a in arrays if DType.of_numpy(a.dtype).is_float)
