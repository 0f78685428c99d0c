"""Device-neutral clean-up: dead code, constants, shapes, common subexpressions, denormal weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunewright.errors import UnsupportedError
from tunewright.ir.graph import Graph, Node, Value, freeze
from tunewright.ir.types import DType
from tunewright.ops import lookup
from tunewright.ops.base import Array
from tunewright.ops.infer import propagate

from ..base import Context
from ..pattern import ORIGINS, remove_dead

#: Operations whose constant inputs are weights, which innermost loops read many times.
WEIGHTED = frozenset(
    {"Conv", "ConvTranspose", "DeformConv", "MatMul", "Gemm", "com.microsoft::FusedMatMul", "Einsum", "RNN", "GRU"}
    | {"LSTM"}
)
#: operations that have integer forms
PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
#: the number of elements that the cache of a core holds
PART = 1 << 16


class DeadCode:
    """Removes nodes whose results are not read."""

    name = "dead-code"

    def run(self, graph: Graph, context: Context) -> bool:
        before = len(graph)
        remove_dead(graph, reversed(graph.nodes))
        return len(graph) != before


class Propagate:
    """Infers types and folds constants in one sweep (see `ops.infer`).

    ``keep_quantised``: quantised weights stay quantised while their operation may still become an integer one, that is,
    while its other operand is dequantised too. Folding them later gives the same numbers, so that this costs nothing.
    Device passes see the quantised form first, and the rest is folded afterwards. ``bodies``: also infer the types of
    control flow's results, which takes a sweep through each body.
    """

    name = "propagate"

    def __init__(self, keep_quantised: bool = False, bodies: bool = False) -> None:
        self.keep = is_quantised_weight if keep_quantised else None
        self.bodies = bodies

    def run(self, graph: Graph, context: Context) -> bool:
        return propagate(graph, context.budget, tolerant=context.in_body, keep=self.keep, bodies=self.bodies)


def is_quantised_weight(node: Node) -> bool:
    """Whether a node is a DequantizeLinear whose result meets another dequantised value in a product."""
    if node.op != "DequantizeLinear":
        return False
    readers = [n for n in node.output.users if n.op in PRODUCTS]
    others = (v.producer for n in readers for v in n.inputs[:2] if v is not None and v is not node.output)
    return any(p is not None and p.op == "DequantizeLinear" for p in others)


class FoldQuantised:
    """Folds quantised weights that were kept, and that no integer operation uses."""

    name = "fold-quantised"

    def run(self, graph: Graph, context: Context) -> bool:
        return any(is_quantised_weight(node) for node in graph.nodes) and Propagate().run(graph, context)


class UnknownOps:
    """Raises an error that names every operator without a definition."""

    name = "unknown-ops"

    def run(self, graph: Graph, context: Context) -> bool:
        unknown = [n for n in graph.nodes if lookup(n.op) is None]
        if unknown:
            ops = sorted({n.op for n in unknown})
            raise UnsupportedError(
                f"no definition of {', '.join(ops)}",
                where=f"node {unknown[0].name!r}",
                hint="an extension may add one: an entry point in group tunewright.ops",
            )
        return False


class CommonSubexpressions:
    """Merges nodes that compute the same from the same inputs, and equal small constants."""

    name = "common-subexpressions"
    #: Larger constants are weights: comparing them costs more than it saves.
    CONSTANT_BYTES = 1 << 12

    def run(self, graph: Graph, context: Context) -> bool:
        constants: dict[Any, Value] = {}
        same: dict[Any, Node] = {}
        changed = False
        for node in graph.nodes:
            for i, value in enumerate(node.inputs):
                if value is not None and value.const is not None and value.const.nbytes <= self.CONSTANT_BYTES:
                    first = constants.setdefault(freeze(value.const), value)
                    if first is not value:
                        graph.set_input(node, i, first)
            if any(v is not None and v.const is None and len(v.uses) == 1 for v in node.inputs):
                continue  # No other node reads this input, so that none computes the same.
            spec = lookup(node.op)
            if node.bodies or spec is None or not spec.pure:
                continue
            steps = tuple((s.op, s.args, freeze(s.attrs)) for s in node.epilogue)
            key = (node.op, freeze(node.attrs), tuple(node.inputs), len(node.outputs), steps)
            twin = same.setdefault(key, node)
            if twin is node:
                continue
            for mine, kept in zip(node.outputs, twin.outputs, strict=True):
                kept.type = kept.type or mine.type
                graph.replace(mine, kept)
            twin.origin = tuple(dict.fromkeys([*twin.origin, *node.origin]))[:ORIGINS]
            context.log.applied(self.name, node)
            graph.remove(node)
            changed = True
        return changed


class FlushDenormals:
    """Replaces weights too small for a normal float by zero: processors compute many times slower with them.

    Half precision makes zeros of them without this pass.
    """

    name = "flush-denormals"

    def run(self, graph: Graph, context: Context) -> bool:
        if not context.settings.flush_denormals or context.precision is DType.FLOAT16:
            return False
        changed = False
        for value in list(graph.constants()):
            users = [n for n in value.users if n.op in WEIGHTED]
            array = value.const
            if not users or array is None or array.dtype not in (np.float32, np.float64):
                continue
            if not _has_denormals(array):
                continue
            tiny = (np.abs(array) < np.finfo(array.dtype).tiny) & (array != 0)
            flushed = graph.constant(np.where(tiny, array.dtype.type(0), array), value.name)
            for node, i in list(value.uses):
                if node.op in WEIGHTED:
                    graph.set_input(node, i, flushed)
            context.log.applied(self.name, users[0])
            changed = True
        return changed


def _has_denormals(array: Array) -> bool:
    """Whether an array has denormals. It works in parts that fit the cache; most parts have no number that small."""
    flat, least = array.reshape(-1), np.finfo(array.dtype).tiny
    for first in range(0, flat.size, PART):
        sizes = np.abs(flat[first : first + PART])
        if not sizes.min() >= least and ((sizes < least) & (sizes != 0)).any():
            return True
    return False
