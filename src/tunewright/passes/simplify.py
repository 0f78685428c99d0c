"""Device-neutral clean-up: dead code, constants, shapes, expressions computed twice, denormal weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..ir.graph import Graph, Node, Value, freeze
from ..ir.types import DType
from ..ops import lookup
from ..ops.base import Array
from ..ops.infer import propagate
from .base import Context
from .pattern import ORIGINS, remove_dead

#: operations whose constant inputs are weights: read many times, in the innermost loops
WEIGHTED = frozenset(
    {"Conv", "ConvTranspose", "DeformConv", "MatMul", "Gemm", "com.microsoft::FusedMatMul", "Einsum", "RNN", "GRU"}
    | {"LSTM"}
)
#: operations that have integer forms
PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
#: numbers that a core's cache holds
PART = 1 << 16


class DeadCode:
    """Nodes whose results nobody reads."""

    name = "dead-code"

    def run(self, graph: Graph, context: Context) -> bool:
        before = len(graph)
        remove_dead(graph, reversed(graph.nodes))
        return len(graph) != before


class Propagate:
    """Types and constants in one sweep (see `ops.infer`).

    ``keep_quantised``: quantised weights stay quantised while their operation may still become an integer one, that is
    while its other operand is dequantised too. Folding them later gives the same numbers, so this costs nothing: device
    passes see the quantised form first, and what they leave is folded afterwards.

    ``bodies``: also the types of what control flow makes, which takes a sweep through each body.
    """

    name = "propagate"

    def __init__(self, keep_quantised: bool = False, bodies: bool = False) -> None:
        self.keep = is_quantised_weight if keep_quantised else None
        self.bodies = bodies

    def run(self, graph: Graph, context: Context) -> bool:
        return propagate(graph, context.budget, tolerant=context.in_body, keep=self.keep, bodies=self.bodies)


def is_quantised_weight(node: Node) -> bool:
    """Whether it is a DequantizeLinear whose result meets another dequantised value in a product."""
    if node.op != "DequantizeLinear":
        return False
    readers = [n for n in node.output.users if n.op in PRODUCTS]
    others = (v.producer for n in readers for v in n.inputs[:2] if v is not None and v is not node.output)
    return any(p is not None and p.op == "DequantizeLinear" for p in others)


class FoldQuantised:
    """Folds the quantised weights that were kept and that no integer operation took."""

    name = "fold-quantised"

    def run(self, graph: Graph, context: Context) -> bool:
        return any(is_quantised_weight(node) for node in graph.nodes) and Propagate().run(graph, context)


class UnknownOps:
    """Nothing unknown may go further: the error names every operator that has no definition."""

    name = "unknown-ops"

    def run(self, graph: Graph, context: Context) -> bool:
        unknown = [n for n in graph.nodes if lookup(n.op) is None]
        if unknown:
            ops = sorted({n.op for n in unknown})
            raise UnsupportedError(
                f"no definition of {', '.join(ops)}", where=f"node {unknown[0].name!r}",
                hint="an extension may add one: an entry point in group tunewright.ops",
            )
        return False


class CommonSubexpressions:
    """Nodes that compute the same from the same inputs become one; so do equal small constants."""

    name = "common-subexpressions"
    #: larger constants are weights: comparing them costs more than it saves
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
                continue  # nobody else reads this input, so nobody else computes the same
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
    """Weights too small for a normal float become zero: arithmetic on them is many times slower on processors.

    Half precision makes zeros of them by itself.
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
    """In parts: what is made of a whole array would come from memory, and most have no number that small at all."""
    flat, least = array.reshape(-1), np.finfo(array.dtype).tiny
    for first in range(0, flat.size, PART):
        sizes = np.abs(flat[first : first + PART])
        if not sizes.min() >= least and ((sizes < least) & (sizes != 0)).any():
            return True
    return False
