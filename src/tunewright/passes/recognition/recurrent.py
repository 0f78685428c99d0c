"""Converts recurrent cells written as matrix products and gates to LSTM and GRU nodes over one step.

Both forms are those of PyTorch's LSTMCell and GRUCell: two products with a bias, split into gates along the last axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.graph import Graph, Node, Value

from .. import value_facts
from ..pattern import Const, Match, OneOf, Op, Rule


def _linear(node: Node) -> bool:
    """Whether a Gemm computes x W^T + b."""
    neutral = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 1}
    return all(float(node.attrs.get(k, 0 if k.startswith("trans") else 1)) == v for k, v in neutral.items())


def _product(x: str, weights: str, bias: str) -> Op:
    return Op("Gemm", x, Const(weights), Const(bias), where=_linear)


def _split(parts: int) -> Any:
    return lambda node: len(node.outputs) == parts and int(node.attrs.get("axis", 0)) in (1, -1)


# -- LSTM -------------------------------------------------------------------------------------------------------------
_GATES = Op("Add", _product("x", "w", "wb"), _product("h", "r", "rb"))


def _lstm_gate(activation: str, k: int) -> Op:
    return Op(activation, Op("Split", _GATES, rest=True, output=k, where=_split(4)))


_CELL = Op(
    "Add",
    Op("Mul", _lstm_gate("Sigmoid", 1), "c"),
    Op("Mul", _lstm_gate("Sigmoid", 0), _lstm_gate("Tanh", 2)),
    name="cell",
    shared=True,  # the new cell state is a result too
)
_LSTM = Op("Mul", _lstm_gate("Sigmoid", 3), Op("Tanh", _CELL))


def _build_lstm(graph: Graph, match: Match) -> Value:
    order = (0, 3, 1, 2)  # PyTorch's order is input, forget, cell, output; ONNX's is input, output, forget, cell.
    node = graph.add("LSTM", _operands(graph, match, order, ("h", "c")), _attrs(match), outputs=3)
    hidden, cell = (_without_axis(graph, v) for v in node.outputs[1:])
    graph.replace(match["cell"], cell)
    return hidden


# -- GRU --------------------------------------------------------------------------------------------------------------
def _part(side: str, k: int) -> Op:
    product = _product("x", "w", "wb") if side == "x" else _product("h", "r", "rb")
    return Op("Split", product, rest=True, output=k, where=_split(3))


_RESET, _UPDATE = (Op("Sigmoid", Op("Add", _part("x", k), _part("h", k))) for k in (0, 1))
_NEW = Op("Tanh", Op("Add", _part("x", 2), Op("Mul", _RESET, _part("h", 2))))
_GRU = OneOf(
    Op("Add", _NEW, Op("Mul", _UPDATE, Op("Sub", "h", _NEW))),
    Op("Add", Op("Mul", Op("Sub", 1.0, _UPDATE), _NEW), Op("Mul", _UPDATE, "h")),
)


def _build_gru(graph: Graph, match: Match) -> Value:
    order = (1, 0, 2)  # PyTorch's order is reset, update, new; ONNX's is update, reset, new.
    attrs = {**_attrs(match), "linear_before_reset": 1}
    node = graph.add("GRU", _operands(graph, match, order, ("h",)), attrs, outputs=2)
    return _without_axis(graph, node.outputs[1])


# -- common -----------------------------------------------------------------------------------------------------------
def _attrs(match: Match) -> dict[str, Any]:
    return {"hidden_size": int(match.const("r").shape[1])}


def _operands(graph: Graph, match: Match, order: Sequence[int], states: Sequence[str]) -> list[Value | None]:
    """X, W, R, B, no sequence lengths, initial states: one step, one direction, the gates in ONNX's order."""

    def gates(name: str) -> np.ndarray[Any, Any]:
        array = match.const(name)
        return np.concatenate([np.split(array, len(order))[k] for k in order])

    def with_axis(value: Value) -> Value:
        return graph.add("Unsqueeze", [value, graph.constant(np.asarray([0], np.int64), "axes")]).output

    bias = np.concatenate([gates("wb"), gates("rb")])
    weights = [graph.constant(a[None], name) for name, a in (("W", gates("w")), ("R", gates("r")), ("B", bias))]
    return [with_axis(match["x"]), *weights, None, *(with_axis(match[s]) for s in states)]


def _without_axis(graph: Graph, value: Value) -> Value:
    return graph.add("Squeeze", [value, graph.constant(np.asarray([0], np.int64), "axes")]).output


def _fits(gates: int) -> Any:
    def check(match: Match) -> str | None:
        w, r = match.const("w"), match.const("r")
        hidden = r.shape[-1]
        if w.ndim != 2 or r.shape != (gates * hidden, hidden) or w.shape[0] != gates * hidden:
            return f"weights of shape {list(w.shape)} and {list(r.shape)} are no {gates} gates"
        if any(match.const(b).shape != (gates * hidden,) for b in ("wb", "rb")):
            return "a bias does not have one value per gate and unit"
        for name in ("x", "h", "c"):
            if name in match and value_facts.rank(match[name]) != 2:
                return f"{match[name]!r} is not surely a batch of vectors"
        return None

    return check


RULES = (Rule("lstm-cell", _LSTM, _build_lstm, _fits(4)), Rule("gru-cell", _GRU, _build_gru, _fits(3)))
