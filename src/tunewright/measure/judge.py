"""Check kernels before their times count: compare their results with the reference, and verify what memory they write.

Inputs and outputs lie between guard bands. Each kernel runs twice, and a different poison byte fills the outputs before
each run. An element that is not written therefore differs between the runs, even if one value happens to be right. The
two runs must agree bit by bit, which reveals races. The results must match the reference within the table of tolerances
(`ops.tolerance`), and the inputs must be unchanged.
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
from ..ops.infer import MISTAKES
from ..ops.internal.reorder import from_plain, to_plain
from ..ops.tolerance import bias, compare, deviation
from ..solvers.base import Array, Kernel, Problem
from ..solvers.epilogue_types import coarsest
from ..solvers.host.reference import HostKernel
from . import random_inputs as inputs
from .repeated_inputs import repeat

#: Bytes on either side of a tensor that kernels may not write.
GUARD = 256
#: Copies of inputs and results that exist at a time while a kernel is judged.
POSED = 6
#: Right results of a case that are kept. Candidates often agree, and comparing bits takes a hundredth of the time of
#: comparing numbers.
MOST_RIGHT = 2
#: Content of outputs before a run: NaN in every float type; then large numbers.
POISONS = (0xFF, 0x7F)


@dataclass(frozen=True)
class Judgement:
    """What is wrong with a kernel, in words (empty if nothing), and its largest deviation relative to the result."""

    wrong: str
    error: float = 0.0


#: An operation that quantises its own intermediate results: near a tie both roundings are right, and large layers
#: always contain ties. Only small ones (by the sum of all sizes) are judged.
QUANTISED_STATE, MOST_STATE = "com.microsoft::DynamicQuantizeLSTM", 1000


class Guarded:
    """A tensor in a device's memory with guard bands around it."""

    def __init__(self, device: Device, type: TensorType, stagger: int = 0) -> None:
        #: ``stagger`` cache lines of offset keep tensors of equal size from all having the same alignment
        self.device, self.type, self.start = device, type, GUARD + 64 * stagger
        self.buffer = device.alloc(self.start + type.nbytes + GUARD)
        self.view = device.view(self.buffer, self.start, type)

    @staticmethod
    def holding(device: Device, queue: Queue, array: Array, stagger: int = 0) -> Guarded:
        """Make one that holds a copy of a host array."""
        found = Guarded(device, TensorType.of(array), stagger)
        found.poison(queue, POISONS[0])
        queue.put(array, found.view)
        return found

    def twin(self, queue: Queue) -> Guarded:
        """Return a copy, made on the device."""
        found = copy(self)
        found.buffer = queue.duplicate(self.buffer)
        found.view = self.device.view(found.buffer, self.start, self.type)
        return found

    def poison(self, queue: Queue, byte: int) -> None:
        """Fill tensor and bands with a byte."""
        queue.fill(self.buffer, byte)

    def tensor(self, fetched: Array) -> Array:
        """Return the tensor within the bytes that `Queue.fetch` returned for the buffer."""
        return np.ndarray(self.type.physical, self.type.dtype.numpy, fetched, self.start)

    def is_intact(self, fetched: Array, byte: int) -> bool:
        """Whether the bands are unchanged."""
        end = self.start + self.type.nbytes
        return not ((fetched[: self.start] != byte).any() or (fetched[end:] != byte).any())


@dataclass(frozen=True)
class Right:
    """Results of a kernel that were right, and their deviation."""

    results: Sequence[Array]
    error: float
    #: buffers of each run with their bands, if the device compares buffers itself
    buffers: Sequence[Sequence[Any]]

    def agrees(self, results: Sequence[Array]) -> bool:
        return all(same(mine, other) for mine, other in zip(self.results, results, strict=True))

    def is_in(self, queue: Queue, outs: Sequence[Guarded], run: int) -> bool:
        """Whether the outputs hold the same bytes, and the bands are unchanged."""
        return all(queue.equal(out.buffer, mine) for out, mine in zip(outs, self.buffers[run], strict=True))


@dataclass
class Kept:
    """State for later kernels on the same inputs: copying and comparing large tensors takes longer than computing."""

    #: the most recent right results
    right: list[Right] = field(default_factory=list)
    #: inputs with a copy, if the device compares buffers itself; not those that kernels pack
    inputs: dict[int, tuple[Guarded, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class JudgedCase:
    """Inputs in the problem's layouts, and the reference's results for them."""

    name: str
    inputs: Sequence[Array | None]
    want: Sequence[Array]
    #: all results are finite
    finite: bool


class Judge:
    """Judges kernels of one problem. Inputs and the reference's results are computed once, on first use."""

    def __init__(self, problem: Problem, device: Device, seed: int = 0) -> None:
        self.problem, self.device, self.seed = problem, device, seed
        #: by name of the case
        self._kept: dict[str, Kept] = {}

    @cached_property
    def terms(self) -> float:
        """Number of terms that are summed up for an element of the result."""
        return terms(self.problem)

    @cached_property
    def unfit(self) -> str | None:
        """Why the problem cannot be judged; None if it can."""
        for type in [*self.problem.inputs, *self.problem.outputs]:
            if type is not None and not (isinstance(type, TensorType) and type.is_static):
                return f"{type} has no static shape"
            if type is not None and type.dtype is DType.STRING:
                return "its strings are not measured"
        if None in self.problem.outputs:
            return "nothing is known of a result"
        if self.problem.op == QUANTISED_STATE and sum(self.problem.sizes) > MOST_STATE:
            # for 2 of 12 random layers of 512 units the state differed from the reference by one step, and both were
            # right
            return "it rounds its own state, so a rounding step cannot be told from an error"
        most, needed = (
            free_bytes(),
            POSED * sum(t.nbytes for t in [*self.problem.inputs, *self.problem.outputs] if isinstance(t, TensorType)),
        )
        if most is not None and needed > most / 2:
            return f"checking it needs {needed:,} bytes, and {most:,} are free"
        ops = [self.problem.op, *(step.op for step in self.problem.epilogue)]
        missing = [op for op in ops if lookup(op) is None]
        if missing:
            return f"no definition of {missing[0]}"
        try:
            terms(self.problem)
        except MISTAKES as error:  # a problem from a file may make no sense
            return f"its types do not fit: {error or repr(error)}"
        return None if isinstance(self._random, JudgedCase) else self._random

    @property
    def cases(self) -> Sequence[JudgedCase]:
        """Random inputs, which are also used for timing, then edge cases if the reference accepts them."""
        first = self._random
        assert isinstance(first, JudgedCase), first
        return [first, *([self._edge] if isinstance(self._edge, JudgedCase) else [])]

    @cached_property
    def _random(self) -> JudgedCase | str:
        """Random inputs; tame ones if the reference refuses those or its results are not finite."""
        found = self._case("random")
        if isinstance(found, JudgedCase) and found.finite:
            return found
        tame = self._case("tame")
        return tame if isinstance(tame, JudgedCase) else found

    @cached_property
    def _edge(self) -> JudgedCase | str:
        """Edge cases; tame inputs if sums overflow, because the overflow depends on the order of summation."""
        found, spec = self._case("edge"), lookup(self.problem.op)
        simple = spec is not None and spec.elementwise and not self.problem.epilogue
        return found if isinstance(found, JudgedCase) and (simple or found.finite) else self._case("tame")

    def _case(self, kind: str) -> JudgedCase | str:
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
        return JudgedCase(kind, given, want, finite)

    def check(self, kernel: Kernel, queue: Queue) -> Judgement:
        """Check the kernel on all cases and return the verdict."""
        error = 0.0
        for case in self.cases:
            kept = self._kept.setdefault(case.name, Kept())
            verdict = examine(kernel, self.problem, self.device, queue, case.inputs, case.want, self.terms, kept)
            error = max(error, verdict.error)
            if verdict.wrong:
                self._kept.clear()  # the kernel may have written anywhere
                return Judgement(f"{case.name} inputs: {verdict.wrong}", error)
        return Judgement("", error)

    def right(self, queue: Queue, n: int, buffer: Any) -> Any | None:
        """Return the buffer of a right output n for the random inputs that equals ``buffer``, bands included; or None.

        Works only on a device that compares buffers itself. The bands hold the first poison byte.
        """
        known = self._kept.get(self.cases[0].name, Kept()).right
        return next((r.buffers[0][n] for r in known if r.buffers[0] and queue.equal(buffer, r.buffers[0][n])), None)

    def compare(self, n: int, array: Array, like: DType | None = None) -> str:
        """Describe how output n differs from the reference for the random inputs; empty if it does not.

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
) -> Judgement:
    """Run a kernel on inputs in the problem's layouts and return the verdict.

    ``kept``: state from earlier kernels. A right result of this kernel is added to it.
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
            return Judgement(f"run {run + 1}: it reports that {reported.what}", error)
        if queue.compares and not run:
            known = next((r for r in kept.right if r.is_in(queue, outs, run)), None)
        if queue.compares and known is not None and known.is_in(queue, outs, run):
            before, error = known.results, known.error
        else:
            results: list[Array] = []
            for n, (out, buffer) in enumerate(zip(outs, queue.fetch([out.buffer for out in outs]), strict=True)):
                if not out.is_intact(buffer, poison):
                    return Judgement(f"output {n}, run {run + 1}, is written out of bounds", error)
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
                    return Judgement(f"output {n}, run {run + 1}: {wrong}", error)
                if before is not None:
                    return Judgement(f"output {n} differs between two runs on the same inputs", error)
            before = results
        if (at := _written(queue, there, given)) is not None:
            return Judgement(f"it writes to its input {at}", error)
        buffers.append([out.buffer for out in outs] if queue.compares else [])
    if known is None and before is not None and kernel.like is None:
        kept.right[:] = [*kept.right, Right(before, error, buffers)][-MOST_RIGHT:]
    return Judgement("", error)


def _placed(
    at: int, array: Array | None, kernel: Kernel, device: Device, queue: Queue, kept: dict[int, tuple[Guarded, Any]]
) -> tuple[Guarded, Any] | None:
    """Place an input on the device, with a second copy there for comparison if the device compares buffers itself."""
    if array is None or (at in kept and at not in kernel.packings):
        return kept.get(at)
    guarded = Guarded.holding(device, queue, array)
    placed = guarded, queue.duplicate(guarded.buffer) if queue.compares else None
    if queue.compares and at not in kernel.packings:
        kept[at] = placed
    return placed


def _written(queue: Queue, there: Sequence[tuple[Guarded, Any] | None], given: Sequence[Array | None]) -> int | None:
    """Return the first input that changed, bands included; None if there is none."""
    held = [(at, *p, a) for at, (p, a) in enumerate(zip(there, given, strict=True)) if p is not None and a is not None]
    if queue.compares:
        return next((at for at, g, before, _ in held if not queue.equal(g.buffer, before)), None)
    for (at, g, _, a), buffer in zip(held, queue.fetch([g.buffer for _, g, _, _ in held]), strict=True):
        if not g.is_intact(buffer, POISONS[0]) or not same(g.tensor(buffer), a):
            return at
    return None


def _meant(array: Array, type: object) -> Array:
    """Return the elements without the padding of a last block; their order does not matter."""
    blocked = isinstance(type, TensorType) and type.layout.name == "blocked"
    return to_plain(array, _tensor(type)) if blocked else array


def physical(problem: Problem, plain: Sequence[Array | None]) -> list[Array | None]:
    """Convert logical arrays into the problem's layouts. The padding of a last block holds poison."""
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
    """Return the inputs, with constants packed as the kernel expects them."""
    packed = list(given)
    for i, packing in kernel.packings.items():
        array = packed[i]
        assert array is not None and problem.constant[i]
        packed[i] = packing.pack(array)
    return packed


def terms(problem: Problem) -> float:
    """Return the number of terms that are summed up for an element of the result: about half of its operations."""
    spec = lookup(problem.op)
    outputs = [t for t in problem.outputs if isinstance(t, TensorType)]
    size = sum(t.size for t in outputs)
    if spec is None or not size:
        return 1.0
    main = [t if isinstance(t, TensorType) else None for t in problem.main_inputs]
    count = spec.work(main, outputs, problem.attrs).flops / size / 2
    return max(count, _row(problem, outputs[0].dims), 1.0)


def _row(problem: Problem, dims: tuple[int, ...]) -> float:
    """Return the number of elements summed to normalise an element; 0 for operations that do not normalise."""
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
    """Whether two results are equal bit by bit."""
    return a.shape == b.shape and np.array_equal(_bytes(a), _bytes(b))


def _bytes(array: Array) -> Array:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint64 if flat.nbytes % 8 == 0 else np.uint8)


def _odd(array: Array) -> str:
    """Describe a Boolean that is neither 0 nor 1; empty if there is none."""
    return "a truth value is neither 0 nor 1" if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any() else ""


def _is_finite(arrays: Sequence[Array]) -> bool:
    with np.errstate(all="ignore"):
        return all(np.isfinite(a.astype(np.float64)).all() for a in arrays if DType.of_numpy(a.dtype).is_float)
