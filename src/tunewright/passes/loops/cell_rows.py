"""Brings the values of a loop's body into the normal form of `rows`, node by node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ops.base import Array

from .. import value_facts
from .rows import (
    DEFAULTS,
    MOST_PARTS,
    Activation,
    NotRowsError,
    Polynomial,
    Rows,
    activated,
    beside,
    combine,
    multiplied,
)

#: operation -> the parameters of its activation, with ONNX's defaults
ACTIVATIONS: Mapping[str, Mapping[str, float]] = {
    "Elu": {"alpha": 1.0},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "LeakyRelu": {"alpha": 0.01},
    "Relu": {},
    "Sigmoid": {},
    "Softplus": {},
    "Softsign": {},
    "Tanh": {},
    "ThresholdedRelu": {"alpha": 1.0},
}


class CellRows:
    """The rows of every value of a body that has this form; ``why`` has the reasons for the others.

    ``given``: rows of the inputs of a step. Their numbers are below ``serial``.
    """

    def __init__(self, body: Graph, given: Mapping[Value, Rows], serial: int) -> None:
        self.rows: dict[Value, Rows] = dict(given)
        self.why: dict[Value, str] = {}
        self._serials = count(serial)
        for node in body.nodes:
            if node.outputs[0] not in self.rows:
                self._node(node)

    def _node(self, node: Node) -> None:
        bad = next((v for v in node.inputs if v is not None and v.const is None and v not in self.rows), None)
        try:
            if bad is not None and bad in self.why:
                raise NotRowsError(self.why[bad])
            handler = HANDLERS.get(node.op)
            if bad is not None or handler is None or node.bodies or node.epilogue:
                raise NotRowsError(f"{node.name or node.op!r} ({node.op}) is no part of a recurrent cell")
            results = handler(self, node)
        except NotRowsError as error:
            self.why.update(dict.fromkeys(node.outputs, str(error)))
            return
        self.rows.update(zip(node.outputs, results, strict=True))

    # -- operands -----------------------------------------------------------------------------------------------------
    def first(self, node: Node, i: int = 0) -> Rows:
        value = node.input(i)
        if value is None or value not in self.rows:
            raise NotRowsError(f"{node.name or node.op!r} ({node.op}) works on constants")
        return self.rows[value]

    def like(self, value: Value | None, other: Rows) -> Rows:
        """An operand for a combination with ``other``: rows, or a constant for all rows."""
        if value is None:
            raise NotRowsError("an operand is absent")
        if value.const is None:
            return self.rows[value]
        dims = value.const.shape
        if len(dims) > len(other.axes) + 1 or any(d != 1 for d in dims[:-1]) or dims[-1:] not in (
            (), (1,), (other.width,),
        ):  # fmt: skip
            raise NotRowsError(f"a constant of shape {list(dims)} differs between rows")
        if value.const.dtype.kind != "f" and "float" not in value.const.dtype.name:
            raise NotRowsError(f"a constant is {value.const.dtype}")
        return Rows(other.axes, (Polynomial.constant(np.broadcast_to(value.const.reshape(-1), (other.width,))),))

    def pair(self, node: Node) -> tuple[Rows, Rows]:
        a, b = node.inputs
        known = next((self.rows[v] for v in (a, b) if v is not None and v in self.rows), None)
        if known is None:
            raise NotRowsError("it works on constants")
        return self.like(a, known), self.like(b, known)

    def serial(self) -> int:
        return next(self._serials)


def _scaled(rows: Rows, factor: float) -> Rows:
    constant = Polynomial.constant(np.full(rows.width, factor))
    return rows if factor == 1 else combine(rows, Rows(rows.axes, (constant,)), multiply=True)


# -- element by element ------------------------------------------------------------------------------------------------
def _add(cell: CellRows, node: Node) -> list[Rows]:
    return [combine(*cell.pair(node), multiply=False)]


def _sub(cell: CellRows, node: Node) -> list[Rows]:
    a, b = cell.pair(node)
    return [combine(a, _scaled(b, -1.0), multiply=False)]


def _mul(cell: CellRows, node: Node) -> list[Rows]:
    return [combine(*cell.pair(node), multiply=True)]


def _neg(cell: CellRows, node: Node) -> list[Rows]:
    return [_scaled(cell.first(node), -1.0)]


def _same(cell: CellRows, node: Node) -> list[Rows]:
    return [cell.first(node)]


def _activation(cell: CellRows, node: Node) -> list[Rows]:
    parameters = {k: float(node.attrs.get(k, default)) for k, default in ACTIVATIONS[node.op].items()}
    return [activated(cell.first(node), Activation(node.op, **parameters), cell.serial())]


def _clip(cell: CellRows, node: Node) -> list[Rows]:
    bounds = [v.const.reshape(-1).tolist() if v is not None and v.const is not None else None for v in node.inputs[1:]]
    if bounds != [[0.0], [1.0]]:
        raise NotRowsError("a Clip is not to 0 and 1")
    return [activated(cell.first(node), Activation("HardSigmoid", 1.0, 0.0), cell.serial())]


# -- products ----------------------------------------------------------------------------------------------------------
def _matrix(value: Value | None) -> Array:
    if value is None or value.const is None or value.const.ndim != 2:
        raise NotRowsError("a matrix product's weights are no constant matrix")
    return value.const


def _matmul(cell: CellRows, node: Node) -> list[Rows]:
    return [multiplied(cell.first(node), _matrix(node.input(1)), cell.serial())]


def _gemm(cell: CellRows, node: Node) -> list[Rows]:
    rows, matrix, attrs = cell.first(node), _matrix(node.input(1)), node.attrs
    if attrs.get("transA", 0) or rows.axes != "b":
        raise NotRowsError("a Gemm turns its first operand round")
    product = multiplied(rows, matrix.T if attrs.get("transB", 0) else matrix, cell.serial())
    product = _scaled(product, float(attrs.get("alpha", 1.0)))
    if node.input(2) is None:
        return [product]
    bias = _scaled(cell.like(node.input(2), product), float(attrs.get("beta", 1.0)))
    return [combine(product, bias, multiply=False)]


# -- columns -----------------------------------------------------------------------------------------------------------
def _along_columns(axis: int, rows: Rows) -> None:
    if axis not in (-1, len(rows.axes)):
        raise NotRowsError(f"it works along axis {axis} of {len(rows.axes) + 1}")


def _concat(cell: CellRows, node: Node) -> list[Rows]:
    parts = [cell.first(node, i) for i in range(len(node.inputs))]
    _along_columns(int(node.attrs["axis"]), parts[0])
    return [beside(parts)]


def _split(cell: CellRows, node: Node) -> list[Rows]:
    rows, n = cell.first(node), len(node.outputs)
    _along_columns(int(node.attrs.get("axis", 0)), rows)
    if n > MOST_PARTS:
        raise NotRowsError(f"a Split makes {n} parts")
    each = -(-rows.width // n)
    equal = [each] * (n - 1) + [rows.width - each * (n - 1)]
    sizes = equal if node.input(1) is None else value_facts.int_list(node.input(1)) or []
    if len(sizes) != n or sum(sizes) != rows.width or min(sizes) <= 0:
        raise NotRowsError(f"a Split makes parts of {sizes} of {rows.width} columns")
    ends = np.cumsum(sizes).tolist()
    return [rows.columns(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _slice(cell: CellRows, node: Node) -> list[Rows]:
    rows = cell.first(node)
    starts, ends, axes, steps = (value_facts.int_list(node.input(i)) for i in (1, 2, 3, 4))
    if any(node.input(i) is not None and value_facts.int_list(node.input(i)) is None for i in (1, 2, 3, 4)):
        raise NotRowsError("a Slice takes columns that are not constant")
    if not starts or not ends or not axes or len(starts) != 1 or (steps or [1]) != [1]:
        raise NotRowsError("a Slice is not along one axis")
    _along_columns(axes[0], rows)
    start, stop, _ = slice(starts[0], ends[0]).indices(rows.width)
    if stop <= start:
        raise NotRowsError("a Slice takes nothing")
    return [rows.columns(start, stop)]


# -- axes of one element -----------------------------------------------------------------------------------------------
def _axes(node: Node, rank: int) -> list[int]:
    given = value_facts.int_list(node.input(1))
    if given is None:
        raise NotRowsError(f"the axes of {node.name or node.op!r} are not constant")
    if any(not -rank <= a < rank for a in given):
        raise NotRowsError(f"{node.name or node.op!r} has axes {given} of {rank}")
    return [a % rank for a in given]


def _squeeze(cell: CellRows, node: Node) -> list[Rows]:
    rows = cell.first(node)
    gone = _axes(node, len(rows.axes) + 1)
    if any(rows.axes[a : a + 1] != "u" for a in gone):
        raise NotRowsError("a Squeeze takes away what may not be an axis of one element")
    return [Rows("".join(c for i, c in enumerate(rows.axes) if i not in gone), rows.parts)]


def _gather(cell: CellRows, node: Node) -> list[Rows]:
    """x[0] of an axis of one element."""
    rows, at = cell.first(node), int(node.attrs.get("axis", 0))
    index = node.input(1)
    if index is None or index.const is None or index.const.shape != () or int(index.const) not in (0, -1):
        raise NotRowsError("a Gather picks more than the one element of an axis")
    if rows.axes[at : at + 1] != "u" or at < 0:
        raise NotRowsError("a Gather picks from what may not be an axis of one element")
    return [Rows(rows.axes[:at] + rows.axes[at + 1 :], rows.parts)]


def _unsqueeze(cell: CellRows, node: Node) -> list[Rows]:
    rows, given = cell.first(node), value_facts.int_list(node.input(1))
    rank = len(rows.axes) + 1 + len(given or ())
    new = _axes(node, rank)
    if rank - 1 in new or len(set(new)) != len(new):
        raise NotRowsError("an Unsqueeze adds an axis behind the columns")
    rest = iter(rows.axes)
    return [Rows("".join("u" if i in new else next(rest) for i in range(rank - 1)), rows.parts)]


def _reshape(cell: CellRows, node: Node) -> list[Rows]:
    """A Reshape may only add or remove axes of one element."""
    rows, target = cell.first(node), value_facts.int_list(node.input(1))
    if not target or target[-1] != rows.width or node.attrs.get("allowzero", 0):
        raise NotRowsError("a Reshape changes the columns")
    kept = [d == -1 or (d == 0 and rows.axes[i : i + 1] == "b") for i, d in enumerate(target[:-1])]
    if sum(kept) != 1 or any(d != 1 and not k for d, k in zip(target, kept, strict=False)):
        raise NotRowsError("a Reshape changes the batch")
    return [Rows("".join("b" if k else "u" for k in kept), rows.parts)]


# -- recurrent layers over one step ------------------------------------------------------------------------------------
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
#: attributes of a plain layer; other values are refused
_PLAIN = {"direction": "forward", "clip": 0.0, "layout": 0, "input_forget": 0}


def _layer(cell: CellRows, node: Node) -> list[Rows]:
    """A cell that was exported as a layer of one step."""
    attrs, x = node.attrs, cell.first(node)
    if any((attrs.get(k) or plain) != plain for k, plain in _PLAIN.items()) or x.axes != "ub":
        raise NotRowsError(f"{node.name or node.op!r} ({node.op}) is no layer of one step in one direction")
    if node.input(4) is not None or node.input(7) is not None:
        raise NotRowsError(f"{node.name or node.op!r} ({node.op}) has lengths or peepholes")
    names = tuple(attrs.get("activations") or DEFAULTS[node.op])[: len(DEFAULTS[node.op])]
    if any(name not in ACTIVATIONS or ACTIVATIONS[name] for name in names):
        raise NotRowsError(f"{node.name or node.op!r} ({node.op}) has activations {', '.join(names)}")
    step = _Step(cell, node, x, [Activation(name) for name in names])
    made = {"LSTM": step.lstm, "GRU": step.gru, "RNN": step.rnn}[node.op]()
    every = Rows("u" + made[0].axes, made[0].parts)
    return [every, *made][: len(node.outputs)]


class _Step:
    """One step of a recurrent layer as rows."""

    def __init__(self, cell: CellRows, node: Node, x: Rows, activations: list[Activation]) -> None:
        self.cell, self.node, self.x, self.activations = cell, node, x, activations
        self.w, self.r = (_stacked(node.input(i), 3) for i in (1, 2))
        self.units = self.r.shape[2]
        gates = _GATES[node.op]
        bias = np.zeros((1, 2 * gates * self.units)) if node.input(3) is None else _stacked(node.input(3), 2)
        if self.w.shape[:2] != (1, gates * self.units) or self.r.shape[:2] != self.w.shape[:2]:
            raise NotRowsError(f"{node.name or node.op!r} ({node.op}) has weights of another shape")
        if bias.shape != (1, 2 * gates * self.units):
            raise NotRowsError(f"{node.name or node.op!r} ({node.op}) has a bias of another shape")
        self.wb, self.rb = np.split(bias[0], 2)
        self.h = self._state(5)

    def _state(self, i: int) -> Rows:
        value = self.node.input(i)
        if value is None:
            return Rows("ub", (Polynomial(self.units, {}),))
        if value.const is not None or self.cell.rows[value].axes != "ub":
            raise NotRowsError("a layer of one step starts from something else than a carried state")
        return self.cell.rows[value]

    def _part(self, rows: Rows, weights: Array, bias: Array, gate: int) -> Rows:
        at = slice(gate * self.units, (gate + 1) * self.units)
        product = multiplied(rows, weights[0, at].T, self.cell.serial())
        return combine(product, Rows("ub", (Polynomial.constant(bias[at]),)), multiply=False)

    def _gate(self, k: int, activation: int) -> Rows:
        both = combine(self._part(self.x, self.w, self.wb, k), self._part(self.h, self.r, self.rb, k), multiply=False)
        return self._activated(both, activation)

    def _activated(self, rows: Rows, activation: int) -> Rows:
        return activated(rows, self.activations[activation], self.cell.serial())

    def _sum(self, a: Rows, b: Rows, c: Rows, d: Rows) -> Rows:
        """The rows a b + c d."""
        return combine(combine(a, b, multiply=True), combine(c, d, multiply=True), multiply=False)

    def lstm(self) -> list[Rows]:
        enter, out, forget, fresh = (self._gate(k, 1 if k == 3 else 0) for k in range(4))
        memory = self._sum(forget, self._state(6), enter, fresh)
        return [combine(out, self._activated(memory, 2), multiply=True), memory]

    def gru(self) -> list[Rows]:
        update, reset = self._gate(0, 0), self._gate(1, 0)
        if self.node.attrs.get("linear_before_reset", 0):
            inner = combine(reset, self._part(self.h, self.r, self.rb, 2), multiply=True)
        else:
            inner = self._part(combine(reset, self.h, multiply=True), self.r, self.rb, 2)
        both = combine(self._part(self.x, self.w, self.wb, 2), inner, multiply=False)
        one = Rows("ub", (Polynomial.constant(np.ones(self.units)),))
        kept = combine(one, _scaled(update, -1.0), multiply=False)
        return [self._sum(kept, self._activated(both, 1), update, self.h)]

    def rnn(self) -> list[Rows]:
        return [self._gate(0, 0)]


def _stacked(value: Value | None, rank: int) -> Array:
    if value is None or value.const is None or value.const.ndim != rank:
        raise NotRowsError("a layer of one step has weights that are not constant")
    return value.const


Handler = Callable[[CellRows, Node], list[Rows]]
HANDLERS: Mapping[str, Handler] = {
    "Identity": _same,
    "Add": _add,
    "Sub": _sub,
    "Mul": _mul,
    "Neg": _neg,
    "Clip": _clip,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Reshape": _reshape,
    **dict.fromkeys(_GATES, _layer),
    **dict.fromkeys(ACTIVATIONS, _activation),
}
