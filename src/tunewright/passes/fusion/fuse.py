"""Fuses element-wise followers into the epilogue of the operation in front of them. Fusion asks the device, rule by
rule.

A `Fusion` is data: the main operations, the followers, and the permitted shapes of their other operands. From a main
operation the region grows over followers in topological order, as long as only followers read its results. It is cut
back to the last point where a single value leaves it and the device agrees.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from tunewright.ir.graph import Fused, Graph, Node, Value
from tunewright.ir.launch_symbols import foreseen
from tunewright.ir.symbolic import WHOLE

from .. import value_facts
from ..base import Context


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


UNARY = names(
    """Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid
    HardSwish IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus
    Softsign Sqrt Swish Tan Tanh ThresholdedRelu com.microsoft::Gelu com.microsoft::QuickGelu"""
)
SCALE_SHIFT = frozenset({"Add", "Sub", "Mul", "Div", "PRelu", "Clip", "Min", "Max", "Pow"})
QUANTIZE = frozenset({"org.openvinotoolkit::FakeQuantize"})
SUM = frozenset({"Add", "Sum"})
OTHER = names(
    """And BitShift BitwiseAnd BitwiseOr BitwiseXor Equal Greater GreaterOrEqual Less LessOrEqual Mean Mod Or Sum Where
    Xor"""
)
ELEMENTWISE = UNARY | SCALE_SHIFT | QUANTIZE | OTHER
CONVOLUTION = names("Conv ConvTranspose ConvInteger com.microsoft::FusedConv")
POOLING = frozenset({"AveragePool", "MaxPool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"})
FULLY_CONNECTED = names(
    """Gemm MatMul MatMulInteger com.microsoft::FusedMatMul com.microsoft::MatMulIntegerToFloat
    com.microsoft::DynamicQuantizeMatMul com.microsoft::MatMulNBits"""
)
NORMALISATION = names("LayerNormalization RMSNormalization GroupNormalization InstanceNormalization")
#: a longer vector is not a shape
MOST_AXES = 16


@dataclass(frozen=True)
class Fusion:
    """One kind of fusion. ``axis``: where operands per channel vary (None: any that does not enlarge the result)."""

    name: str
    mains: frozenset[str]
    steps: frozenset[str]
    axis: int | None = None
    #: whether operands of exactly the result's shape are permitted
    residual: bool = False
    #: work backwards, so that the later one of two added convolutions takes the sum
    backwards: bool = True
    #: Wait until shapes are known: not every device has a kernel for it, and the device cannot tell before.
    static: bool = False

    #: the longest epilogue: kernels of longer ones compile slowly and gain nothing
    LONGEST = 64


FUSIONS = (
    Fusion("convolution-simple", CONVOLUTION, UNARY | SCALE_SHIFT | QUANTIZE, axis=1),
    Fusion("convolution-sum", CONVOLUTION, UNARY | SCALE_SHIFT | QUANTIZE | SUM, axis=1, residual=True),
    Fusion("pooling-fakequantize", POOLING, QUANTIZE, axis=1),
    Fusion("fully-connected-activation", FULLY_CONNECTED, UNARY | SCALE_SHIFT | QUANTIZE | SUM, axis=-1, residual=True),
    # Embeddings: operands such as positions are added to the picked rows and broadcast over them.
    Fusion("gather-simple", frozenset({"Gather"}), UNARY | SCALE_SHIFT, backwards=False, static=True),
    Fusion("normalisation-simple", NORMALISATION, UNARY | SCALE_SHIFT, backwards=False, static=True),
    Fusion("element-wise", ELEMENTWISE, ELEMENTWISE, backwards=False),
)


@dataclass
class FusedRegion:
    """A main node, the followers taken so far, and their epilogue as one node."""

    main: Node
    followers: list[Node] = field(default_factory=list)
    operands: list[Value] = field(default_factory=list)
    epilogue: list[Fused] = field(default_factory=list)
    #: value -> result number in the epilogue's program (~0 is the main operation)
    results: dict[Value, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.operands = [v for v in self.main.inputs[len(self.main.main_inputs) :] if v is not None]
        self.epilogue = list(self.main.epilogue)
        self.results[self.main.output] = ~len(self.epilogue)

    def add(self, node: Node) -> None:
        """Take a follower, with its epilogue, if any."""
        base = len(self.epilogue)
        places = [self._place(v) for v in node.inputs if v is not None]
        self.epilogue.append(Fused(node.op, tuple(places[: len(node.main_inputs)]), node.attrs))
        for step in node.epilogue:
            args = tuple(places[a] if a >= 0 else ~(base + 1 + ~a) for a in step.args)
            self.epilogue.append(Fused(step.op, args, step.attrs))
        self.followers.append(node)
        self.results[node.output] = ~len(self.epilogue)

    def _place(self, value: Value) -> int:
        if value in self.results:
            return self.results[value]
        if value not in self.operands:
            self.operands.append(value)
        return len(self.main.main_inputs) + self.operands.index(value)

    @property
    def size(self) -> tuple[int, int, int]:
        return len(self.followers), len(self.operands), len(self.epilogue)

    def cut(self, size: tuple[int, int, int]) -> None:
        """Return to an earlier size."""
        del self.followers[size[0] :], self.operands[size[1] :], self.epilogue[size[2] :]


class Fuse:
    """Applies the fusions in order."""

    name = "fuse"

    def __init__(self, fusions: tuple[Fusion, ...] = FUSIONS) -> None:
        self.fusions = fusions

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for fusion in self.fusions:
            if not context.enabled(fusion.name):
                continue
            nodes = graph.nodes
            mains = [n for n in nodes if n.op in fusion.mains and any(u.op in fusion.steps for u, _ in n.output.uses)]
            if not mains:
                continue
            order = {node: at for at, node in enumerate(nodes)}
            leaving = set(graph.outputs)
            fused = False
            for node in reversed(mains) if fusion.backwards else mains:
                if node in graph and len(node.outputs) == 1 and not node.bodies:
                    fused |= self._fuse(graph, node, fusion, order, leaving, context)
            if fused:
                graph.sort()
                changed = True
        return changed

    def _fuse(
        self, graph: Graph, main: Node, fusion: Fusion, order: dict[Node, int], leaving: set[Value], context: Context
    ) -> bool:
        region = FusedRegion(main)
        start = best = region.size
        for node, single_exit, reason in grow(region, fusion, order, leaving):
            if reason is None:
                region.add(node)
                if not single_exit:
                    continue
                reason = context.can_fuse(main, region.operands, tuple(region.epilogue), node.output)
                if reason is None:
                    best = region.size
                    continue
            if reason:
                context.log.refused(fusion.name, node, f"not into {main.name!r}: {reason}")
            break
        if best == start:
            return False
        region.cut(best)
        last = region.followers[-1]
        fused = commit(graph, region, context, fusion.name)
        order[fused] = order[last]
        if last.output in leaving:
            leaving.add(fused.output)
        return True


def grow(
    region: FusedRegion, fusion: Fusion, order: dict[Node, int], leaving: set[Value]
) -> Iterator[tuple[Node, bool, str | None]]:
    """The followers to take next, in topological order: (node, whether its result alone then leaves the region, None).

    It ends with the first follower that cannot be taken, and the reason. A result alone leaves the region when no other
    follower is waiting: then all readers of the values before it are inside.

    No cycle can arise. An operand computed from the region passes through another reader of one of its values. Such a
    reader is either a follower that was taken before, or ends the growth.
    """
    waiting: list[tuple[int, Node]] = []
    seen: set[Node] = set()
    tip: Value = region.main.output
    while len(region.epilogue) < Fusion.LONGEST:
        followers = [n for n in tip.users if n.op in fusion.steps and len(n.outputs) == 1 and not n.bodies]
        other = next((n for n in tip.users if n not in followers), None)
        if followers and (other is not None or tip in leaving):
            reader = f"also read by {other.name!r}" if other is not None else "an output of the graph"
            yield followers[0], False, f"%{tip.name} is {reader}"
            return
        if other is not None or tip in leaving:
            return
        for node in followers:
            if node not in seen:
                seen.add(node)
                heapq.heappush(waiting, (order[node], node))
        if not waiting:
            return
        _, node = heapq.heappop(waiting)
        reason = why_not(node, region, fusion)
        yield node, not waiting, reason
        if reason is not None:
            return
        tip = node.output


def why_not(node: Node, region: FusedRegion, fusion: Fusion) -> str | None:
    """Why a follower cannot be part of the region; None when only the device may refuse it.

    An empty reason means that this fusion ignores the follower, and a later one tries it.
    """
    result = region.main.output
    if None in _given(node):
        return "an optional operand in the middle is absent"
    if _shape_arithmetic(node, fusion):
        return "it may be shape arithmetic, which is folded instead"
    if fusion.static and any(v is not None and value_facts.static(v) is None for v in (*node.inputs, node.output)):
        return "shapes are not known yet"
    others = [v for v in node.inputs if v is not None and v not in region.results]
    if all(value_facts.is_scalar(v) and (value_facts.rank(v) or 0) <= (value_facts.rank(result) or 0) for v in others):
        return None
    if fusion.axis is not None and not fusion.residual and any(v.const is None for v in others):
        return ""
    if not value_facts.same_shape(node.output, result):
        return f"{node.output!r} may be larger than {result!r}"
    for value in others:
        if fusion.axis is not None and not _fits(value, result, fusion):
            return f"{value!r} is neither one value per channel of {result!r} nor of its shape"
    return None


def _given(node: Node) -> list[Value | None]:
    """The inputs without absent ones at the end."""
    last = max((i for i, v in enumerate(node.inputs) if v is not None), default=-1)
    return node.inputs[: last + 1]


def _shape_arithmetic(node: Node, fusion: Fusion) -> bool:
    """Whether a node may compute shapes: fusion would prevent folding such vectors once shapes are known."""
    kind, dims = value_facts.dtype(node.output), value_facts.shape(node.output)
    if fusion.backwards or (kind is not None and not kind.is_integer):
        return False
    if not dims:
        return True
    return len(dims) == 1 and not (isinstance(dims[0], WHOLE) and foreseen(dims[0]) > MOST_AXES)


def _fits(value: Value, result: Value, fusion: Fusion) -> bool:
    """Whether a value is a scalar, one value per channel, or (for residuals) has exactly the result's shape."""
    if value_facts.is_scalar(value) or (fusion.residual and value_facts.same_shape(value, result)):
        return True
    dims, whole = value_facts.shape(value), value_facts.shape(result)
    if dims is None or whole is None or fusion.axis is None:
        return False
    at = fusion.axis % len(whole)
    padded = (1,) * (len(whole) - len(dims)) + tuple(dims)
    return all(d == 1 for k, d in enumerate(padded) if k != at)


def commit(graph: Graph, region: FusedRegion, context: Context, rule: str) -> Node:
    """Replace a region by one node."""
    main, last = region.main, region.followers[-1]
    members = [main, *region.followers]
    inputs = [*main.main_inputs, *region.operands]
    fused = graph.add(
        main.op,
        inputs,
        main.attrs,
        types=[last.output.type],
        name=main.name,
        origin=[name for node in members for name in node.origin],
        epilogue=tuple(region.epilogue),
        operands=len(region.operands),
    )
    fused.output.name, last.output.name = last.output.name, fused.output.name
    graph.replace(last.output, fused.output)
    for node in reversed(members):
        graph.remove(node)
    context.log.applied(rule, main)
    return fused
