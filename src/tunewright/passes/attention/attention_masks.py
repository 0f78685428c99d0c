"""Interprets the steps of an attention's scores one after the other: scale, cap, biases and hidden keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tunewright.ir.graph import Graph, Value
from tunewright.ir.symbolic import WHOLE, SymArray, same, sym_array
from tunewright.ir.types import Dim, DType, Shape
from tunewright.ops import lookup
from tunewright.ops.base import Array
from tunewright.ops.infer import evaluate, infer_node

from .. import value_facts
from .attention_steps import AttentionStep

#: An addend that hides a score: nothing remains of the score beside it, and kernels may multiply it by log2(e).
HIDDEN = -1e38
#: the most values that are examined to find out whether -inf may be among them
MOST_VALUES = 64
#: operations that make finite numbers from finite ones, as long as nothing overflows
_FINITE = frozenset(
    {"Add", "Sub", "Mul", "Neg", "Where", "Max", "Min", "Abs", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}
    | {"Expand", "Transpose", "Slice", "Gather", "GatherND", "Concat", "Identity", "Tile", "Split", "ScatterND"}
)


class Maker:
    """Adds nodes to a graph and infers their types; nodes of constants are computed at once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def node(self, op: str, inputs: Sequence[Value | None], attrs: Mapping[str, Any] | None = None) -> Value:
        node = self.graph.add(op, inputs, attrs or {})
        spec = lookup(op)
        assert spec is not None
        infer_node(node, spec)
        arrays = [None if v is None else v.const for v in inputs]
        if any(a is None for a in arrays) or any(isinstance(a, SymArray) for a in arrays):
            return node.output
        (result,) = evaluate(node, spec, arrays)
        self.graph.remove(node)
        assert isinstance(result, np.ndarray)
        return self.graph.constant(np.ascontiguousarray(result), op.lower())

    def number(self, value: float, dtype: DType) -> Value:
        return self.graph.constant(np.asarray(value, dtype.numpy), "number")

    def shaped(self, value: Value, dims: Sequence[Dim]) -> Value | None:
        """The value in another shape; None where that is unknown. A value that has the shape already is returned
        itself."""
        if not all(isinstance(d, WHOLE) for d in dims):
            return None
        source: Value | None = value
        while source is not None:
            known = value_facts.shape(source)
            if known is not None and len(known) == len(dims) and all(map(_equal, known, dims)):
                return source
            node = source.producer
            views = node is not None and node.op in ("Reshape", "Squeeze", "Unsqueeze", "Flatten") and not node.epilogue
            source = node.inputs[0] if node is not None and views else None
        return self.node("Reshape", [value, self.graph.constant(sym_array(list(dims)), "shape")], {"allowzero": 1})

    def lead(self, value: Value, lead: Sequence[Dim]) -> Value | None:
        """[any axes, a, b] with axes ``lead`` in front; None where shapes are unknown. One head for all stays one."""
        dims = value_facts.shape(value)
        if dims is None:
            return None
        if len(dims) == len(lead) + 2:
            return value
        return self.shaped(value, (*lead, *dims[-2:]))


def _equal(a: Dim, b: Dim) -> bool:
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


class Masks:
    """Collects the scale, cap and mask of an Attention.

    ``lead``: batch and heads of the Attention; ``zeroed``: conditions by which weights become zero.
    """

    def __init__(self, made: Maker, scores: Shape, lead: Sequence[Dim], zeroed: set[tuple[Value, bool]]) -> None:
        self.made, self.keys, self.target, self.zeroed = made, scores[-1], tuple(lead), zeroed
        self.factor, self.cap = 1.0, 0.0
        self.bias: Value | None = None
        self.seen: Value | None = None
        #: conditions of the steps so far: the value, and whether it marks the visible keys
        self.conditions: set[tuple[Value, bool]] = set()

    def follow(self, step: AttentionStep) -> str | None:
        """Applies the next step; returns the reason if that is impossible."""
        match = step.match
        if step.kind in ("cast", "view"):
            return None
        if step.kind in ("times", "over"):
            factor = float(match.const("factor").reshape(()))
            return self._times(factor if step.kind == "times" else 1 / factor if factor else math.inf)
        if step.kind == "capped":
            return self._capped(step)
        shape = value_facts.shape(step.result)
        assert shape is not None
        added = step.kind in ("bias", "less")
        given = self._placed(match["bias" if added else "seen"], shape)
        if isinstance(given, str):
            return given
        if added:
            return self._add(given if step.kind == "bias" else self.made.node("Neg", [given]))
        self.conditions.add((match["seen"], step.kind == "seen"))
        return self._hide(step, given if step.kind == "seen" else self.made.node("Not", [given]))

    def result(self, guarded: bool) -> tuple[Value | None, bool]:
        """The mask, and whether a row that hides every key is NaN. ``guarded``: the graph replaces NaN by zero."""
        mask = self.bias if self.bias is not None else self.seen
        return mask, mask is not None and not guarded and not self.zeroed and may_hide_all(mask)

    def _times(self, factor: float) -> str | None:
        if not factor > 0 or not math.isfinite(factor):
            return f"its scores are multiplied by {factor}"
        if self.cap:
            return "its scores are scaled behind their cap"
        self.factor *= factor
        if self.bias is not None:
            kind = value_facts.dtype(self.bias)
            assert kind is not None
            self.bias = self.made.node("Mul", [self.bias, self.made.number(factor, kind)])
        return None

    def _capped(self, step: AttentionStep) -> str | None:
        """Applies tanh(scores / over) * cap: the Attention divides by its cap."""
        cap = float(step.match.const("cap").reshape(()))
        given = step.match.const("over" if "over" in step.match else "under")
        inner = float(given.reshape(()))
        if self.bias is not None or self.seen is not None or self.cap or not cap > 0 or not inner > 0:
            return "its scores are capped behind a mask"
        self.factor *= cap / inner if "over" in step.match else cap * inner
        self.cap = cap
        return None

    def _add(self, bias: Value) -> str | None:
        kind = value_facts.dtype(bias)
        if kind is None or "float" not in str(kind):
            return f"{bias!r} is added to its scores"
        bias = self._not_too_low(bias, kind)
        if self.seen is not None:
            self.bias, self.seen = self._where(self.seen, bias, -math.inf), None
        elif self.bias is not None:
            other = value_facts.dtype(self.bias)
            if other is not kind:
                wide = kind if other is None or kind.itemsize > other.itemsize else other
                bias, self.bias = (self._cast(v, wide) for v in (bias, self.bias))
            self.bias = self.made.node("Add", [self.bias, bias])
        else:
            self.bias = bias
        return None

    def _cast(self, value: Value, to: DType) -> Value:
        return value if value_facts.dtype(value) is to else self.made.node("Cast", [value], {"to": to.onnx_code})

    def _hide(self, step: AttentionStep, seen: Value) -> str | None:
        low = float(step.match.const("low").reshape(()))
        always = seen.const is not None and bool(seen.const.any(-1).all())
        if low == -math.inf or always or (step.match["seen"], step.kind == "seen") in self.zeroed:
            if self.bias is not None:
                self.bias = self._where(seen, self.bias, -math.inf)
            else:
                self.seen = seen if self.seen is None else self.made.node("And", [self.seen, seen])
            return None
        zero = self.made.number(0, DType.FLOAT32)
        if self.seen is not None:
            self.bias, self.seen = self._where(self.seen, zero, -math.inf), None
        self.bias = self._where(seen, self.bias if self.bias is not None else zero, HIDDEN)
        return None

    def _where(self, seen: Value, bias: Value, low: float) -> Value:
        bias = self._cast(bias, DType.FLOAT32) if low != -math.inf else bias
        kind = value_facts.dtype(bias)
        assert kind is not None
        return self.made.node("Where", [seen, bias, self.made.number(low, kind)])

    def _not_too_low(self, bias: Value, kind: DType) -> Value:
        """The bias with a lower limit, because -3.4e38 times log2(e) would be -inf."""
        if kind not in (DType.FLOAT32, DType.BFLOAT16):
            return bias
        if bias.const is not None:
            low = np.isfinite(bias.const) & (bias.const < HIDDEN)
            if not low.any():
                return bias
            return self.made.graph.constant(np.where(low, bias.const.dtype.type(HIDDEN), bias.const), bias.name)
        finite, low_ = _range(bias)
        return self.made.node("Max", [bias, self.made.number(HIDDEN, kind)]) if finite and low_ else bias

    # -- position of masks
    # ------------------------------------------------------------------------------------------------

    def _placed(self, mask: Value, stage: Shape) -> Value | str:
        """A bias or condition for scores of shape ``stage`` in the axes of the Attention, or why that is impossible."""
        mask = _unspread(mask)
        dims = value_facts.shape(mask)
        if dims is None or not dims or len(dims) > len(stage):
            return f"the mask {mask!r} does not lie along the scores"
        if dims[-1] == 1 and self.keys != 1 and isinstance(self.keys, WHOLE):
            ends = self.made.graph.constant(sym_array([*([1] * (len(dims) - 1)), self.keys]), "keys")
            mask = self.made.node("Expand", [mask, ends])
            dims = (*dims[:-1], self.keys)
        if not (dims[-1] is self.keys or dims[-1] == self.keys) or dims[-1] is None:
            return f"the mask {mask!r} does not end like the scores"
        lead, outer = stage[:-2], dims[:-2]
        if len(lead) == len(self.target) or all(d == 1 for d in outer):
            while len(dims) > 4:
                dims = dims[1:]
            placed = mask if len(dims) == len(value_facts.shape(mask) or ()) else self.made.shaped(mask, dims)
            return mask if placed is None else placed
        return self._regrouped(mask, dims, lead)

    def _regrouped(self, mask: Value, dims: Shape, lead: Shape) -> Value | str:
        """The mask with the axes of the Attention, where the scores have other axes for batch and heads here."""
        if len(outer := dims[:-2]) == len(lead) and same(outer, lead):
            shaped = self.made.shaped(mask, [*self.target, *dims[-2:]])
            return shaped if shaped is not None else f"the mask {mask!r} has an open shape"
        if not all(isinstance(d, int) for d in (*lead, *self.target, *dims)):
            return f"the mask {mask!r} stands at other axes than the Attention's"
        sizes, goals = [int(d) for d in lead], [int(d) for d in self.target]  # type: ignore[arg-type]
        full = [1] * (len(sizes) + 2 - len(dims)) + [int(d) for d in dims]  # type: ignore[arg-type]
        wide, wanted = list(full), list[int]()
        for (first, end), (start, stop) in _blocks(sizes, goals):
            if any(d != 1 for d in full[first:end]):
                wide[first:end] = sizes[first:end]
                wanted += goals[start:stop]
            else:
                wanted += [1] * (stop - start)
        if len(wanted) != len(goals):
            return f"the mask {mask!r} stands at other axes than the Attention's"
        if wide != full:
            mask = self.made.node("Expand", [mask, self.made.graph.constant(np.asarray(wide, np.int64), "axes")])
        shaped = self.made.shaped(mask, [*wanted, *full[-2:]])
        return shaped if shaped is not None else f"the mask {mask!r} has an open shape"


def _blocks(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The smallest ranges of axes of two shapes of equal size that contain equal numbers of elements."""
    i = j = 0
    while i < len(a) or j < len(b):
        first, start, left, right = i, j, 1, 1
        while (i == first and j == start) or left != right:
            if i < len(a) and (left <= right or j == len(b)):
                left, i = left * a[i], i + 1
            elif j < len(b):
                right, j = right * b[j], j + 1
            else:
                return
        yield (first, i), (start, j)


def _unspread(mask: Value) -> Value:
    """A mask before it was spread over queries, heads or samples; an Attention does that without help."""
    for _ in range(4):
        node, dims = mask.producer, value_facts.shape(mask)
        if node is None or node.epilogue or dims is None:
            break
        given = [v for v in node.inputs if v is not None]
        if node.op == "And":
            true = [v for v in given if v.const is not None and bool(v.const.all())]
            smaller = [v for v in given if v not in true]
        else:
            smaller = given[:1] if node.op == "Expand" else []
        known = value_facts.shape(smaller[0]) if len(smaller) == 1 else None
        if known is None or len(known) != len(dims) or known[-1] is None or known[-1] != dims[-1]:
            break
        mask = smaller[0]
    return mask


def may_hide_all(mask: Value) -> bool:
    """Whether a row of this mask may hide every key; True where that is unknown."""
    if mask.const is not None:
        visible: Array = mask.const if mask.const.dtype == np.bool_ else ~np.isneginf(mask.const.astype(np.float32))
        return not bool(visible.any(-1).all())
    return value_facts.dtype(mask) is DType.BOOL or not _range(mask)[0]


def _range(value: Value) -> tuple[bool, bool]:
    """Whether a value is certainly finite, and whether some constant in it may be lower than `HIDDEN`."""
    seen, queue, finite, low = set[Value](), [value], True, False
    while queue:
        one = queue.pop()
        if one in seen:
            continue
        seen.add(one)
        kind = value_facts.dtype(one)
        if kind is not None and "float" not in str(kind):
            continue  # whole numbers and conditions are finite
        if one.const is not None:
            numbers = one.const.astype(np.float64)
            finite &= bool(np.isfinite(numbers).all())
            low |= bool((np.isfinite(numbers) & (numbers < HIDDEN)).any())
            continue
        node = one.producer
        if node is None or kind is None or len(seen) > MOST_VALUES:
            return False, low
        if not {node.op, *(step.op for step in node.epilogue)} <= _FINITE | {"Equal", "Not", "And", "Or", "Less"}:
            return False, low
        queue += [v for v in node.inputs if v is not None]
    return finite, low
