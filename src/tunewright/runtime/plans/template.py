"""Plans for classes of shapes: which parts of a plan depend on sizes, and how to compute these parts for other sizes.

A `Template` belongs to a plan that was made with symbolic sizes (`ir/symbolic.py`). Its guards say for which shapes the
plan holds. Its formulas compute shapes of slots, places in memory and kernel arguments in microseconds.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tunewright.devices.base import Device
from tunewright.devices.control_rows import Block, LaunchRow, sizes, walk
from tunewright.devices.executable import Sizes
from tunewright.errors import TunewrightError
from tunewright.ir.formulas import Computed, Formulas
from tunewright.ir.graph import Graph, Node
from tunewright.ir.symbolic import LEAST, MOST, Guards, ShapeTrace, SymArray, SymInt, Whole, at_hand
from tunewright.ir.types import TensorType, Type
from tunewright.solvers.base import Problem, attrs_at_hand
from tunewright.solvers.shape_classes import numbers, with_numbers

from .growing_buffers import GrowingState
from .memory_layout import ALIGNMENT, Stack

#: rows to spare that plans are made for; the value where nothing grows
SPARE = 64
#: fits that a template keeps
MOST_FITS = 128


class Untraceable(Exception):
    """No plan can be made for the class of shapes; a plan for the exact shapes can."""

    #: the node that prevents it, if known
    node: Node | None = None


@dataclass(frozen=True)
class ShapeClass:
    """A class of shapes of a plan's inputs."""

    #: for each input: element type and dimensions, None where a symbol stands; None: the input is no tensor
    inputs: tuple[tuple[Any, tuple[int | None, ...]] | None, ...]
    #: (input, axis) of each symbol
    symbols: tuple[tuple[int, int], ...]
    #: (input, axis, number of the symbol) where a symbol stands again
    same: tuple[tuple[int, int, int], ...] = ()
    #: inputs that need no check, because the caller knows them
    known: frozenset[int] = frozenset()

    @cached_property
    def _checks(self) -> list[tuple[int, Any, tuple[int | None, ...], int | None]]:
        """The checks of each tensor: input, element type, dimensions, and the earlier input with the same ones."""
        number = {(at, axis): k for k, (at, axis) in enumerate(self.symbols)}
        number |= {(at, axis): k for at, axis, k in self.same}
        first: dict[Any, int] = {}
        found = []
        for at, wanted in enumerate(self.inputs):
            if wanted is not None and at not in self.known:
                dtype, dims = wanted
                like = dtype, dims, tuple(number.get((at, axis)) for axis in range(len(dims)))
                twin = first.setdefault(like, at)
                found.append((at, dtype, dims, None if twin == at else twin))
        return found

    @cached_property
    def _apart(self) -> list[tuple[int, int, int]]:
        """The entries of `same`, without tensors that have the type and dimensions of an earlier tensor."""
        twins = {at for at, _, _, twin in self._checks if twin is not None}
        return [one for one in self.same if one[0] not in twins | self.known]

    @cached_property
    def _absent(self) -> list[int]:
        return [at for at, wanted in enumerate(self.inputs) if wanted is None and at not in self.known]

    def sizes(self, inputs: Sequence[Any]) -> tuple[int, ...] | None:
        """Return the values of the symbols. None: the inputs are of another class."""
        for at in self._absent:
            if inputs[at] is not None:
                return None
        for at, dtype, dims, twin in self._checks:
            value = inputs[at]
            shape = getattr(value, "shape", None)
            if shape is None or (value.dtype is not dtype and value.dtype != dtype):
                return None
            if twin is not None:
                if shape != inputs[twin].shape:
                    return None
                continue
            if len(shape) != len(dims):
                return None
            if shape == dims:
                continue
            for got, want in zip(shape, dims, strict=True):
                if got != want if want is not None else not LEAST <= got <= MOST:
                    return None
        sizes = tuple([inputs[at].shape[axis] for at, axis in self.symbols])
        for at, axis, symbol in self._apart:
            if inputs[at].shape[axis] != sizes[symbol]:
                return None
        return sizes


def symbolic(
    types: Sequence[Type | None], symbol_of: Callable[[int, int], str | None], names: Sequence[str], grows: bool = True
) -> tuple[ShapeTrace, ShapeClass, list[Type | None]]:
    """Begin a trace with symbols for open sizes, and return it with the class of shapes and the symbolic types.

    ``symbol_of(input, axis)`` names the symbol of a size, or returns None where the size is fixed. ``grows``: results
    may have rows to spare (`states`). Raises Untraceable.
    """
    trace, made = ShapeTrace(), list(types)
    inputs: list[tuple[Any, tuple[int | None, ...]] | None] = []
    symbols: list[tuple[int, int]] = []
    same: list[tuple[int, int, int]] = []
    known: dict[str, SymInt] = {}
    for at, type in enumerate(types):
        if type is None:
            inputs.append(None)
            continue
        if not isinstance(type, TensorType) or not type.is_static:
            raise Untraceable(f"input {names[at]} is no tensor")
        dims: list[Any] = list(type.dims)
        for axis, size in enumerate(type.dims):
            name = symbol_of(at, axis)
            if name is None or not LEAST <= size <= MOST:
                continue
            if name not in known:
                known[name] = trace.symbol(name, size)
                symbols.append((at, axis))
            elif known[name].hint != size:
                raise Untraceable(f"{name} is {size} and {known[name].hint}")
            else:
                same.append((at, axis, [*known].index(name)))
            dims[axis] = known[name]
        fixed = tuple(d if isinstance(d, int) else None for d in dims)
        inputs.append((type.dtype.numpy, fixed))
        made[at] = type.with_shape(tuple(dims))
    spare = trace.symbol("spare", SPARE)
    trace.spare = spare if grows else None
    return trace, ShapeClass(tuple(inputs), tuple(symbols), tuple(same)), made


@dataclass(frozen=True, eq=False)
class OpenKernel:
    """A kernel whose problem depends on sizes."""

    problem: Problem
    kernel: Any
    #: the kernel solves its problem under these guards; where they fail, `pose` makes another kernel
    guards: Guards
    #: measured sizes of the same family: such shapes get plans of their own
    measured: frozenset[tuple[int, ...]]
    #: makes the kernel for a problem of given sizes, in the same way if that solves the problem
    pose: Callable[[Problem], Any]


@dataclass
class Traced:
    """What plans of one trace share: the plan of a model, and the plans of its bodies."""

    trace: ShapeTrace
    pattern: ShapeClass
    #: in the order they were made: a kernel that serves several nodes is made once, under its guards
    kernels: list[OpenKernel] = field(default_factory=list)
    #: graphs whose types are symbolic until the trace ends
    graphs: list[Graph] = field(default_factory=list)
    #: for each number that a launch computes itself: its maximum and minimum
    bounds: dict[int, tuple[Whole, Whole]] = field(default_factory=dict)


def bring_at_hand(graph: Graph) -> None:
    """Replace symbolic types, constants and attributes by those of the shapes at hand."""
    for value in graph.values():
        if isinstance(value.type, TensorType):
            if isinstance(value.const, SymArray):
                value.const = at_hand(value.const, value.type.dtype.numpy)
            value.type = value.type.at_hand
    for node in graph.nodes:
        node.attrs = dict(attrs_at_hand(node.attrs))


@dataclass
class Open:
    """The parts of a plan that depend on sizes, collected while the plan is made."""

    #: for each slot: its physical shape, and its offset in its storage
    shapes: dict[int, tuple[Whole, ...]] = field(default_factory=dict)
    offsets: dict[int, Whole] = field(default_factory=dict)
    #: the shape of each slot as text for people
    texts: dict[int, str] = field(default_factory=dict)
    #: inputs that results continue
    states: list[GrowingState] = field(default_factory=list)
    #: for each slot in the arena: its storage, and its offset there
    stored: dict[int, tuple[int, Whole]] = field(default_factory=dict)
    #: bytes of storages in the arena, and of results
    arena: dict[int, Whole] = field(default_factory=dict)
    results: dict[int, Whole] = field(default_factory=dict)
    #: constants that consist of sizes
    constants: dict[int, SymArray] = field(default_factory=dict)
    kernels: list[OpenKernel] = field(default_factory=list)
    #: control flow inside launches
    blocks: list[Block] = field(default_factory=list)
    #: for a body's plan: the offsets of storages in its arena, and the arena's size
    arena_offsets: dict[int, Whole] = field(default_factory=dict)
    arena_bytes: Whole = 0

    def keep_used(self, made: Sequence[OpenKernel], steps: Iterable[Any]) -> None:
        """Keep only those kernels of a trace that the plan uses in its steps or its blocks."""
        used = {step.kernel for step in steps}
        used |= {row.kernel for block in self.blocks for row in walk(block.rows) if isinstance(row, LaunchRow)}
        self.kernels = [one for one in made if one.kernel in used]

    def wanted(self) -> list[Whole]:
        """Every number that formulas have to compute."""
        found: list[Whole] = [*self.offsets.values(), *self.arena.values(), *self.results.values()]
        found += [offset for _, offset in self.stored.values()]
        for block in self.blocks:
            found += sizes(block)
        for shape in self.shapes.values():
            found += shape
        for array in self.constants.values():
            found += array.reshape(-1).tolist()
        for one in self.kernels:
            if one.kernel.open is not None:
                found += one.kernel.open.sizes
            found += numbers(one.problem)
        return found


@dataclass(eq=False)
class Fit:
    """A plan computed for some sizes."""

    #: every value of the formulas, and the kernels that were posed anew
    sizes: Sizes
    arena_bytes: int

    @property
    def values(self) -> Sequence[int]:
        return self.sizes.values


class Template:
    """The class of shapes that a plan serves. Immutable apart from its caches; safe to use from several threads."""

    def __init__(self, traced: Traced, found: Open, stack: Stack, device: Device, most_bytes: int) -> None:
        trace, pattern, wanted = traced.trace, traced.pattern, [*found.wanted(), 0, ALIGNMENT, ALIGNMENT - 1]
        self.pattern, self.trace, self._most_bytes = pattern, trace, most_bytes
        self.formulas = Formulas(trace, wanted, [one.guards for one in found.kernels])
        place, self.texts, self.states = self.formulas.place, found.texts, tuple(found.states)
        #: inputs whose rows may lie apart
        self.apart = frozenset(state.input for state in self.states)
        #: as places of values: physical shapes and offsets of slots, elements of constants
        self.shapes = {at: [place(d) for d in shape] for at, shape in found.shapes.items()}
        self.offsets = {at: place(offset) for at, offset in found.offsets.items()}
        self.constants = {
            at: (array.shape, [place(v) for v in array.reshape(-1).tolist()]) for at, array in found.constants.items()
        }
        #: bytes of storages of results
        self.results = {storage: place(nbytes) for storage, nbytes in found.results.items()}
        self._open_results = {storage for storage, nbytes in found.results.items() if isinstance(nbytes, SymInt)}
        self._kernels = [(one, [place(s) for s in one.problem.sizes]) for one in found.kernels]
        self._measured = [(one.measured, places) for one, places in self._kernels if one.measured]
        self._hints = [atom.hint for atom in trace.atoms[: trace.symbols - 1]]
        made = self.formulas.made
        nbytes = self._on_lines(found.arena)
        offsets, self._arena_bytes = stack.offsets(nbytes, place(0), made)
        #: where storages begin in the arena, and their bytes
        self.storages = {storage: (offsets[storage], nbytes[storage]) for storage in offsets}
        #: for each slot in the arena: its storage, and its offset there
        self.within = {at: (storage, place(offset)) for at, (storage, offset) in found.stored.items()}
        #: where slots begin in the arena
        self.begins = {
            at: made(operator.add, offsets[storage], place(offset)) for at, (storage, offset) in found.stored.items()
        }
        device.compute_formulas(self.formulas)
        self._fits: OrderedDict[tuple[int, ...], Fit | None] = OrderedDict()
        #: sizes that were asked for last, and their values: callers ask for a new size several times
        self._asked: tuple[tuple[int, ...], Computed | None] | None = None

    def _on_lines(self, storages: Mapping[int, Whole]) -> dict[int, int]:
        """Round the bytes of storages up to whole cache lines, at least one."""
        place, made = self.formulas.place, self.formulas.made
        line, more, found = place(ALIGNMENT), place(ALIGNMENT - 1), dict[int, int]()
        for storage, nbytes in storages.items():
            lines = made(operator.floordiv, made(operator.add, place(nbytes), more), line)
            found[storage] = made(max, made(operator.mul, lines, line), line)
        return found

    def distance(self, sizes: tuple[int, ...]) -> float:
        """The largest factor between one of these sizes and the size that the plan was made for."""
        found = 1.0
        for size, hint in zip(sizes, self._hints, strict=True):
            found = max(found, size / hint, hint / size)
        return found

    def misses(self, sizes: tuple[int, ...], spare: int = SPARE) -> int | None:
        """How many kernels these sizes need anew. None: the plan does not hold for them."""
        try:
            known = self._fits[*sizes, spare]
        except KeyError:
            pass
        else:
            return None if known is None else len(known.sizes.posed)
        computed = self._computed((*sizes, spare))
        return None if computed is None else len(computed.failing)

    def _computed(self, sizes: tuple[int, ...]) -> Computed | None:
        """Compute every value, and the kernels that do not serve these sizes. None: the plan does not hold for them."""
        asked = self._asked
        if asked is None or asked[0] != sizes:
            asked = self._asked = sizes, self.formulas.computed(sizes)
        return asked[1]

    def is_measured(self, sizes: tuple[int, ...]) -> bool:
        """Whether there are measurements for exactly these sizes, and the plan was made for others."""
        known = self._measured
        if self.states or not known or self.distance(sizes) == 1.0:
            return False
        computed = self._computed((*sizes, SPARE))
        if computed is None:
            return False
        return any(tuple([computed.values[at] for at in places]) in measured for measured, places in known)

    def fit(self, sizes: tuple[int, ...], spare: int = SPARE) -> Fit | None:
        """Return the plan for these sizes of the inputs' symbols. None: the plan does not hold for them."""
        sizes = (*sizes, spare)
        try:
            return self._fits[sizes]
        except KeyError:
            pass
        found = self._fits[sizes] = self._fitted(sizes)
        while len(self._fits) > MOST_FITS:
            try:
                self._fits.popitem(last=False)
            except KeyError:
                break
        return found

    def _fitted(self, sizes: tuple[int, ...]) -> Fit | None:
        computed = self._computed(sizes)
        if computed is None:
            return None
        values, posed = computed.values, {}
        for scope in computed.failing:
            one, _ = self._kernels[scope]
            kernel = self._posed(one, values)
            if kernel is None:
                return None
            posed[one.kernel] = kernel
        if values[self._arena_bytes] > self._most_bytes:
            return None  # making a plan reports this
        return Fit(Sizes(values, self.formulas.place, posed, sizes[:-1]), values[self._arena_bytes])

    def _posed(self, one: OpenKernel, values: Sequence[int]) -> Any:
        """Return the kernel for these sizes. None: there is none, or it does not fit into this plan."""
        if not one.kernel.is_replaceable:
            return None
        problem = with_numbers(one.problem, lambda number: values[self.formulas.place(number)])
        try:
            kernel = one.pose(problem)
        except TunewrightError:
            return None
        wanted, given = getattr(kernel, "packings", None), one.kernel.packings
        if wanted is None or {i: p.key for i, p in wanted.items()} != {i: p.key for i, p in given.items()}:
            return None
        return kernel if kernel.is_like(one.kernel) else None

    def varies(self, slot: int, storage: int) -> bool:
        """Whether other sizes give a result another shape or another place."""
        return slot in self.shapes or slot in self.offsets or storage in self._open_results

    def fill(self, fit: Fit, memory: Sequence[Any] | Mapping[int, Any], known: dict[int, list[int]]) -> None:
        """Write the constants that consist of sizes, by slot. ``known``: the numbers that are there already."""
        for slot, (shape, places) in self.constants.items():
            numbers = [fit.values[at] for at in places]
            if known.get(slot) == numbers:
                continue
            if len(numbers) == 1:  # most have one number, and this is the fastest way
                memory[slot].fill(numbers[0])
            else:
                memory[slot][...] = np.array(numbers, memory[slot].dtype).reshape(shape)
            known[slot] = numbers
