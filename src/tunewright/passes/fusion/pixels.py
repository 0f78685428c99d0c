"""Gives images of three channels a fourth one, of zeros, where a device has a kernel that makes pixels from planes.

That kernel replaces a Reorder in front of a convolution, and the Cast before it; the number of launches stays the same.
The convolution then reads whole pixels at once. It need not check for borders, because the image includes its padding.
The pass runs after the assignment of layouts.
"""

from __future__ import annotations

from weakref import ref

import numpy as np

from tunewright.ir.graph import Graph, Node
from tunewright.ir.types import NHWC, PLAIN
from tunewright.ops.base import Array
from tunewright.ops.internal.pixels import PIXELS
from tunewright.ops.internal.reorder import REORDER
from tunewright.ops.windows import windows

from .. import value_facts
from ..base import Context, Joined
from ..pattern import remove_dead

#: the number of channels before and after
FROM, TO = 3, 4


class PixelsPass:
    """Rewrites a Reorder if all its readers are convolutions with constant weights."""

    name = "pixels"

    def run(self, graph: Graph, context: Context) -> bool:
        if context.layouts is None or not context.knows(PIXELS):  # the host runs the model's operations
            return False
        found = [node for node in graph.nodes if node.op == REORDER and _is_picture(graph, node)]
        for node in found:
            _rewrite(graph, node, context)
        return bool(found)


def _is_picture(graph: Graph, node: Node) -> bool:
    given, made = value_facts.static(node.inputs[0]), value_facts.static(node.output)
    if given is None or made is None or given.layout != PLAIN or made.layout != NHWC or graph.is_output(node.output):
        return False
    few = len(made.dims) == 4 and made.dims[1] == FROM and made.size > 0 and not node.epilogue
    uses = list(node.output.uses)
    return few and all(_gains(user, i) for user, i in uses) and len({_pads(user) for user, _ in uses}) == 1


def _gains(node: Node, i: int) -> bool:
    """Whether a convolution reads several taps of a row together, which are adjacent."""
    if node.op != "Conv" or i != 0 or node.inputs[1] is None or node.inputs[1].const is None:
        return False
    attrs, weights = node.attrs, node.inputs[1].const
    return weights.shape[-1] > 1 and attrs.get("group", 1) == 1 and tuple(attrs.get("dilations", ()))[1:] in ((), (1,))


def _pads(node: Node) -> tuple[int, ...]:
    """The pads of a convolution (above, left, below, right), as far as windows reach."""
    x, weights = node.inputs[0], node.inputs[1]
    assert x is not None and x.tensor is not None and weights is not None and weights.const is not None
    sizes = x.tensor.dims[2:]
    win = windows(sizes, weights.const.shape[2:], node.attrs)
    return tuple(max(0, p[side]) for side in (0, 1) for p in win.pads(sizes))


def _rewrite(graph: Graph, node: Node, context: Context) -> None:
    source, made, cast = node.inputs[0], node.output.tensor, None
    assert source is not None and made is not None
    before = source.producer
    if before is not None and before.op == "Cast" and not before.epilogue and made.dtype.is_float:
        inner = value_facts.static(before.inputs[0])
        if inner is not None and inner.dtype.is_float and inner.layout == PLAIN:
            cast, source = before, before.inputs[0]
    assert source is not None
    uses = list(node.output.uses)
    pads = _pads(uses[0][0])
    attrs = {"channels": TO, "dtype": made.dtype.onnx_code, "pads": pads}
    sizes = [d + a + b for d, a, b in zip(made.dims[2:], pads[:2], pads[2:], strict=True)]
    types = [made.with_shape((made.dims[0], TO, *sizes))]
    origin = dict.fromkeys([*(cast.origin if cast is not None else ()), *node.origin])
    new = graph.add(PIXELS, [source], attrs, types=types, name=node.name, origin=origin)
    for user, _ in uses:
        user.attrs = {k: v for k, v in user.attrs.items() if k not in ("auto_pad", "pads")}
        weights = user.inputs[1]
        assert weights is not None and weights.const is not None
        graph.set_input(user, 1, graph.constant(_filled(context, weights.const), weights.name))
        graph.set_input(user, 0, new.output)
    remove_dead(graph, [node, *([cast] if cast is not None else [])])
    context.log.applied(PixelsPass.name, new)


def _filled(context: Context, weights: Array) -> Array:
    """The weights with a channel of zeros; all plans of a model share them."""
    key = (TO, id(weights))
    found = context.joined.get(key)
    if found is None or found.parts[0]() is not weights:
        zeros = [(0, TO - FROM if axis == 1 else 0) for axis in range(weights.ndim)]
        found = context.joined[key] = Joined((ref(weights),), np.pad(weights, zeros))
    return found.whole
