"""Proves that a loop is a stack of recurrent layers, and derives each of its results from them.

The proof has three parts. `reading` shows that the loop takes one slice of a tensor after another, all of them and
nothing else, whatever its condition and counters are. `cell_rows` brings the body's values into a normal form, and
`cell_match` finds the next states among known cells. This module shows the rest: every result with a reader is a state
of such a cell, and every initial state has the batch of the input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.types import DType

from .. import value_facts
from ..control.control import plain
from .cell_match import CarriedState, Cells, RecurrentLayer
from .cell_rows import CellRows
from .counts import Count
from .reading import Carried, Collected, IterationSlices, NotReadError, Reading, read
from .rows import MOST_PARTS, NotRowsError, Pick, Polynomial, RowFactor, RowGate, RowProduct, Rows

#: operations that make a tensor of zeros of any shape
_FILLS = frozenset({"ConstantOfShape", "Expand", "Identity"})


@dataclass(frozen=True)
class Start:
    """A layer's initial state: columns of ``value``, or zeros for None. ``spread``: its one row is that of every
    sample."""

    value: Value | None
    start: int
    stop: int
    #: the number of columns of ``value``
    width: int
    spread: bool = False


@dataclass(frozen=True)
class Last:
    """A result of the loop that consists of last states side by side: (layer, whether it is the cell's state)."""

    result: Value
    axes: str
    parts: tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class Every:
    """A result of the loop that every step computes from hidden states and inputs: columns side by side."""

    collected: Collected
    axes: str
    parts: tuple[Polynomial, ...]


@dataclass(frozen=True)
class LoopProof:
    """The layers of a loop, with its inputs and results.

    Layers refer to their inputs by number: first ``sources``, then carried values, and from ``first_layer`` on layers.
    """

    reading: Reading
    sources: tuple[IterationSlices, ...]
    first_layer: int
    layers: tuple[RecurrentLayer, ...]
    #: the initial states of each layer
    starts: tuple[tuple[Start, ...], ...]
    last: tuple[Last, ...]
    every: tuple[Every, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type of inputs, weights and states."""
        dtype: np.dtype[Any] = self.layers[0].gates[0].bias.dtype
        return dtype


def prove(graph: Graph, node: Node, names: bool) -> LoopProof | str:
    """The proof, or why there is none. ``names``: equal names of dimensions mean equal sizes in this graph."""
    try:
        return _Prover(read(graph, node, names)).prove()
    except (NotReadError, NotRowsError) as error:
        return str(error)


class _Prover:
    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.sources = list(dict.fromkeys(s for s, _ in reading.scanned.values() if self._is_sequence(s)))
        if not self.sources:
            raise NotReadError("no slice of what it scans is surely a batch of vectors")
        self.dtype = value_facts.dtype(self.sources[0].tensor)
        self.sources += dict.fromkeys(self._steady().values())
        self.axes: dict[int, str] = {}
        #: sources that results read besides the layers
        self.collected_sources: set[int] = set()
        self.cell = CellRows(reading.body, self._given(), len(self.sources) + len(reading.carried))
        widths = {k: self._width(s.tensor) for k, s in enumerate(self.sources)}
        assert self.dtype is not None
        self.cells = Cells(self.dtype.numpy, widths, len(self.sources) + len(reading.carried))

    def prove(self) -> LoopProof:
        states = {k: self._states(k) for k in range(len(self.reading.carried))}
        known = [s for row in states.values() for s in row]
        if len(known) > MOST_PARTS:
            raise NotRowsError(f"it carries {len(known)} states")
        self.cells.find(known)
        if not self.cells.layers:
            raise NotRowsError(self._why(known))
        last = [self._last(k, states[k]) for k, c in enumerate(self.reading.carried) if self._is_read(c)]
        every = [self._every(c) for c in self.reading.collected if self.reading.is_read(c.result)]
        self._check_sources()
        starts = tuple(tuple(self._start(s) for s in _states_of(layer)) for layer in self.cells.layers)
        sources, layers = tuple(self.sources), tuple(self.cells.layers)
        return LoopProof(self.reading, sources, self.cells.first_layer, layers, starts, tuple(last), tuple(every))

    def _why(self, states: list[CarriedState]) -> str:
        for carried in self.reading.carried:
            if plain(carried.next) in self.cell.why:
                return self.cell.why[plain(carried.next)]
        return self.cells.why_not(states[0], states) if states else "it carries no state of known width"

    def _is_sequence(self, slices: IterationSlices) -> bool:
        """Whether the slices are of [time, batch, features] or [batch, time, features] with known features."""
        tensor = slices.tensor
        return _is_real(tensor) and value_facts.rank(tensor) == 3 and slices.axis in (0, 1) and self._width(tensor) > 0

    def _steady(self) -> dict[Value, IterationSlices]:
        """Batches of vectors that are the same in every step, by their values in the body."""
        found = {}
        for inside, tensor in self.reading.sizes.outer.items():
            fits = tensor.const is None and value_facts.rank(tensor) == 2 and value_facts.dtype(tensor) is self.dtype
            if fits and inside.uses and self._width(tensor) > 0:
                found[inside] = IterationSlices(tensor, None, False)
        return found

    # -- inputs of a step
    # -------------------------------------------------------------------------------------------------
    def _given(self) -> dict[Value, Rows]:
        given = {}
        for value, (slices, stays) in self.reading.scanned.items():
            if slices in self.sources:
                axes = "b" if not stays else "ub" if slices.axis == 0 else "bu"
                given[value] = self._rows(self.sources.index(slices), axes, self._width(slices.tensor))
        for value, slices in self._steady().items():
            given[value] = self._rows(self.sources.index(slices), "b", self._width(slices.tensor))
        for k, carried in enumerate(self.reading.carried):
            n, width = value_facts.rank(carried.first), self._width(carried.first)
            if n not in (2, 3) or (n == 3 and self.reading.sizes.dim(carried.first, 0) != Count(1)):
                continue
            if width > 0 and value_facts.dtype(carried.first) is self.dtype:
                self.axes[k] = "b" if n == 2 else "ub"
                given[carried.inside] = self._rows(len(self.sources) + k, self.axes[k], width)
        return given

    def _width(self, value: Value) -> int:
        """The number of columns of a value; 0 where it is unknown."""
        n = value_facts.rank(value)
        return (self.reading.sizes.dim(value, n - 1).constant or 0) if n else 0

    def _rows(self, source: int, axes: str, width: int) -> Rows:
        return Rows(axes, (Polynomial.of(Pick((source, 0, 0, width), source)),))

    def _states(self, k: int) -> list[CarriedState]:
        """The parts of a carried value; empty where its next value is not rows."""
        carried, source = self.reading.carried[k], len(self.sources) + k
        rows = self._of(carried.next)
        if rows is None:
            return []
        if k not in self.axes and not self.reading.body.is_read(carried.inside):
            self.axes[k] = rows.axes  # no step reads its first value
        elif rows.axes != self.axes.get(k) or rows.width != self._width(carried.first):
            return []
        states, at = [], 0
        for part in rows.parts:
            states.append(CarriedState(k, Pick((source, 0, at, at + part.width), source), part))
            at += part.width
        return states

    def _of(self, value: Value) -> Rows | None:
        return self.cell.rows.get(plain(value)) or self.cell.rows.get(value)

    # -- results ------------------------------------------------------------------------------------------------------
    def _is_read(self, carried: Carried) -> bool:
        return self.reading.is_read(carried.last)

    def _last(self, k: int, states: list[CarriedState]) -> Last:
        carried = self.reading.carried[k]
        if not states:
            reason = self.cell.why.get(plain(carried.next), "its axes change, or are not known")
            raise NotRowsError(f"the carried value %{carried.inside.name} is no state: {reason}")
        return Last(carried.last, self.axes[k], tuple(self._layer(s, carried) for s in states))

    def _layer(self, state: CarriedState, carried: Carried) -> tuple[int, bool]:
        """(layer, whether it is the cell's state) of this state.

        Another carried value may hold the same state. In a loop that runs no iteration, it keeps its own first value.
        """
        for i, layer in enumerate(self.cells.layers):
            for own in _states_of(layer):
                if own is state:
                    return i, own is not layer.hidden
        for i, layer in enumerate(self.cells.layers):
            for own in _states_of(layer):
                if own.new.equals(state.new):
                    first = self.reading.carried[own.carried].first
                    twin = first is carried.first and own.pick.start == state.pick.start
                    if not (twin or self._runs()):
                        raise NotRowsError(f"%{carried.last.name} is something else where nothing is scanned")
                    return i, own is not layer.hidden
        raise NotRowsError(self.cells.why_not(state, self._every_state()))

    def _every_state(self) -> list[CarriedState]:
        return [s for k in range(len(self.reading.carried)) for s in self._states(k)]

    def _runs(self) -> bool:
        length = self.reading.length.constant
        return length is not None and length >= 1

    def _every(self, collected: Collected) -> Every:
        rows = self._of(collected.value)
        if rows is None:
            reason = self.cell.why.get(plain(collected.value), "it is no batch of vectors")
            raise NotRowsError(f"what it collects in %{collected.result.name} is no state: {reason}")
        rank = len(rows.axes) + (1 if collected.joined else 2)
        if not -rank <= collected.axis < rank:
            raise NotRowsError(f"it collects along axis {collected.axis} of {rank}")
        if collected.joined and rows.axes[collected.axis % rank : collected.axis % rank + 1] != "u":
            raise NotRowsError(f"the axis that joins the parts of %{collected.result.name} holds other data too")
        seen: set[RowFactor] = set()
        for part in rows.parts:
            self._check_collected(part, collected, seen)
        return Every(collected, rows.axes, rows.parts)

    def _check_collected(self, part: Polynomial, collected: Collected, seen: set[RowFactor]) -> None:
        """Check that all steps can be computed at once: a part may only depend on inputs and hidden states of the same
        step."""
        if any(layer.hidden.new.equals(part) for layer in self.cells.layers):
            return
        name = collected.result.name
        if not any(part.terms):
            raise NotRowsError(f"what it collects in %{name} is constant")
        for factor in {f for monomial in part.terms for f in monomial} - seen:
            seen.add(factor)
            if isinstance(factor, RowProduct):
                self._check_collected(factor.rows, collected, seen)
            elif isinstance(factor, RowGate):
                self._check_collected(factor.argument, collected, seen)
            elif not isinstance(factor, Pick) or factor.source >= len(self.sources):
                raise NotRowsError(f"what it collects in %{name} is more than a function of the hidden state")
            else:
                self.collected_sources.add(factor.source)

    # -- inputs and initial states ------------------------------------------------------------------------------------
    def _check_sources(self) -> None:
        used = {k for layer in self.cells.layers for gate in layer.gates for k in gate.inputs} | self.collected_sources
        tensors = [self.sources[k] for k in sorted(used) if k < len(self.sources)]
        for i, layer in enumerate(self.cells.layers):
            if not any(self._changes(k) for gate in layer.gates for k in gate.inputs):
                raise NotRowsError(f"layer {i} reads nothing that it scans")
        if {value_facts.dtype(s.tensor) for s in tensors} != {self.dtype}:
            raise NotRowsError("what it scans has different element types")
        batches = {self.reading.sizes.dim(s.tensor, 1 - s.axis) for s in tensors if s.axis is not None}
        if len(batches) != 1:
            raise NotRowsError("the batches of what it scans may differ")
        (self.batch,) = batches
        for s in tensors:
            if s.axis is None and self.reading.sizes.dim(s.tensor, 0) not in (self.batch, Count(1)):
                raise NotRowsError(f"the batch of %{s.tensor.name} may not be that of the input")

    def _changes(self, source: int) -> bool:
        """Whether the source differs from step to step."""
        return source >= len(self.sources) or self.sources[source].axis is not None

    def _start(self, state: CarriedState) -> Start:
        carried = self.reading.carried[state.carried]
        axis = len(self.axes[state.carried]) - 1
        batch = self.reading.sizes.dim(carried.first, axis)
        zero = _is_zero(carried.first)
        start = Start(None if zero else carried.first, state.pick.start, state.pick.stop, self._width(carried.first))
        if batch == self.batch:
            return start
        if batch != Count(1):
            raise NotRowsError(f"the batch of %{carried.first.name} may not be that of the input")
        if self._is_read(carried) and not self._runs():
            raise NotRowsError(f"%{carried.last.name} has one row where nothing is scanned, and the batch's otherwise")
        return replace(start, spread=not zero)


def _states_of(layer: RecurrentLayer) -> list[CarriedState]:
    return [layer.hidden, *([] if layer.cell is None else [layer.cell])]


def _is_real(value: Value) -> bool:
    return value_facts.dtype(value) in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64)


def _is_zero(value: Value, depth: int = 0) -> bool:
    if value.const is not None:
        return value.const.size > 0 and not np.asarray(value.const, np.float64).any()
    node = value.producer
    if node is None or node.op not in _FILLS or depth > 8 or node.epilogue or node.inputs[0] is None:
        return False
    if node.op == "ConstantOfShape":
        fill = node.attrs.get("value")
        return fill is None or not np.asarray(fill, np.float64).any()
    return _is_zero(node.inputs[0], depth + 1)
