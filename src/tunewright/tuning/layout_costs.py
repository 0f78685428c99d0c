"""Costs of layouts on a device, for the pass that assigns layouts: kernels in a layout, and Reorders.

Measurements of exactly the same problem on this processor count, for the plain and the other layout. Everything else is
an estimate, since nothing is measured while a caller waits for a plan. The estimate is the least time that such a
device needs, times the factor by which default kernels were found to exceed it. The device is assumed to have the peak
speeds of a typical core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..devices.base import Device
from ..ir.graph import Node
from ..ir.types import PLAIN, Layout, TensorType
from ..knowledge.key import Where
from ..ops import lookup
from ..ops.infer import MISTAKES
from ..ops.internal.reorder import moves_nothing
from ..passes.base import LayoutChoice
from ..solvers.base import Problem, tensor
from .tuner import Tuner

#: Per unit: cycles per second times multiply-adds of a vector per cycle; and bytes per second, mostly from caches.
VECTORS, BANDWIDTH = 2 * 3.5e9, 25e9
#: Seconds of one step in a launch of many steps.
STEP = 1.5e-6
#: Ways with a shorter estimate are not looked up: the lookup would take longer than it could save.
WORTH_KNOWING = 20e-6
#: Time of the plain kernel over that of the preferred way, and the same for grouped convolutions. Rounded from about 35
#: layers on a busy machine.
PLAIN_KERNEL, PLAIN_GROUPS = 2.0, 3.5
#: The same for the preferred kernel with a plain input: for 1 x 1 convolutions, and for others, which lose Winograd.
PLAIN_PIXELS, PLAIN_WINDOWS = 1.05, 1.6
#: Time of a plain kernel over one in the layout, for operations without a preference; 1 for operations not listed.
PLAIN_OVER = {"Conv": 2.0, "AveragePool": 2.5, "MaxPool": 2.0, "GlobalAveragePool": 1.6, "GlobalMaxPool": 1.6,
              "Transpose": 1.6}  # fmt: skip
#: Operations with kernels that convert into the layout or out of it; the factors of time for both directions.
BETWEEN = {"Transpose": (4.0, 1.0)}
#: Three constants for a depthwise convolution behind another one, fitted to 40 pairs of mobile networks on two units.
#: HELD: bytes of a result that stay in a unit's own cache until they are read. DEPTHWISE: time of the depthwise
#: convolution over that of its arithmetic. TWICE: growth of the first one in a joint kernel, which computes some rows
#: and pixels twice.
HELD, DEPTHWISE, TWICE = 3 << 19, 1.3, 1.06
#: Minimum estimated speed-up of a joint kernel over two: it is one more kernel to compile.
GAIN = 1.08


class LayoutCosts:
    """Implements `passes.base.Layouts` for a device."""

    def __init__(self, tuner: Tuner, device: Device) -> None:
        self.tuner, self.device, self.where = tuner, device, Where.of(device.target)
        units = max(1, device.target.units)
        self.flops = 2.0 * units * max(1, device.target.vector_bytes // 4) * VECTORS
        self.bandwidth = units * BANDWIDTH

    def preferred(self, node: Node) -> tuple[Layout, Layout] | None:
        return self.tuner.layouts(Problem.of(node), self.device)

    def reorder(self, type: TensorType, layout: Layout) -> float:
        type = type.at_hand
        there, plain = type.with_layout(layout), type.with_layout(PLAIN)
        # if one direction only fills up a block, the other one is free already
        if moves_nothing(there, plain):
            return 0.0
        return STEP + (there.nbytes + plain.nbytes) / self.bandwidth

    def ways(
        self, node: Node, preferred: tuple[Layout, Layout] | None, layout: Layout, data: Sequence[int]
    ) -> Sequence[LayoutChoice]:
        plain, along = Problem.of(node), [i for i in data if i]
        flops = self.arithmetic(plain)
        groups = "Conv" in node.op and int(node.attrs.get("group", 1)) > 1
        found: list[tuple[Problem, LayoutChoice]] = []

        def offer(first: Layout, result: Layout, factor: float, known: bool = False, steps: int = 1) -> None:
            problem = _between(plain, first if 0 in data else PLAIN, result, along)
            if known or self.tuner.why_not_layout(problem, self.device) is None:
                seconds = max(_filling(problem) * flops / self.flops, _traffic(problem) / self.bandwidth)
                found.append((problem, LayoutChoice(first, result, steps * STEP + factor * seconds)))

        if preferred is not None:
            offer(*preferred, 1.0, known=True)
            # After a node of the same operation the input is not plain, or only if that node itself runs plain.
            if preferred == (layout, layout) and not groups and not _follows(node):
                # such a kernel first copies its input
                offer(PLAIN, layout, PLAIN_PIXELS if _pixels(plain) else PLAIN_WINDOWS, steps=2)
            # a kernel that prefers another layout also accepts the plain one
            offer(PLAIN, PLAIN, PLAIN_GROUPS if groups else PLAIN_KERNEL, known=True)
        else:
            offer(layout, layout, 2 * PLAIN_KERNEL if groups else 1.0)
            if node.op in BETWEEN:
                offer(PLAIN, layout, BETWEEN[node.op][0])
                offer(layout, PLAIN, BETWEEN[node.op][1])
            if found:
                offer(PLAIN, PLAIN, PLAIN_OVER.get(node.op, 1.0), known=True)
        known = len(found) > 1 and found[0][1].seconds > WORTH_KNOWING
        return self.measured(found) if known else [way for _, way in found]

    def why_apart(self, first: Node, second: Node, whole: Node) -> str | None:
        parts, one = [Problem.of(first), Problem.of(second)], Problem.of(whole)
        # look up the joint kernel first: usually it never ran
        together = self.tuner.lookup.fastest(one, self.where)
        alone = [] if together is None else [self.tuner.lookup.fastest(part, self.where) for part in parts]
        known, least, apart = "measured", 1.0, sum(s for s in alone if s is not None)
        if together is None or None in alone:
            known, least, (apart, together) = "estimated", GAIN, self.pair(*parts)
        if least * together < apart:
            return None
        return f"one kernel takes {1e6 * together:.0f} us, two {1e6 * apart:.0f} ({known})"

    def pair(self, first: Problem, second: Problem) -> tuple[float, float]:
        """Estimate the seconds of a convolution and the depthwise one behind it: as two kernels, and as one."""
        before, behind = (_filling(part) * self.arithmetic(part) / self.flops for part in (first, second))
        moved = max(0, tensor(first.outputs[0]).nbytes - HELD * self.device.target.units)
        apart = before + DEPTHWISE * behind + 2 * moved / self.bandwidth
        return apart, TWICE * before + DEPTHWISE * behind

    def arithmetic(self, plain: Problem) -> float:
        """Return the number of arithmetic operations of a plain problem."""
        spec = lookup(plain.op)
        made = [t for t in plain.outputs if isinstance(t, TensorType)]
        given = [t if isinstance(t, TensorType) else None for t in plain.main_inputs]
        try:
            return spec.work(given, made, plain.attrs).flops if spec is not None else 0.0
        except (*MISTAKES, AssertionError):  # a mistake in the model: running it reports the error
            return 0.0

    def measured(self, found: Sequence[tuple[Problem, LayoutChoice]]) -> list[LayoutChoice]:
        """Replace estimates by measured seconds, and scale the estimates that remain.

        The plain way is looked up first. Usually it was never measured, and then there is nothing to compare the others
        with.
        """
        if self.tuner.lookup.fastest(found[-1][0], self.where) is None:
            return [way for _, way in found]
        seconds = [self.tuner.lookup.fastest(problem, self.where) for problem, _ in found]
        # a way without measurement must not win because the estimates are too optimistic
        scale = max(s / way.seconds for s, (_, way) in zip(seconds, found, strict=True) if s is not None)
        return [
            replace(way, seconds=scale * way.seconds) if s is None else replace(way, seconds=s, measured=True)
            for s, (_, way) in zip(seconds, found, strict=True)
        ]


def _traffic(problem: Problem) -> int:
    """Return the bytes of all inputs and outputs, with the padding of blocks."""
    return sum(t.nbytes for t in [*problem.inputs, *problem.outputs] if isinstance(t, TensorType))


def _filling(problem: Problem) -> float:
    """Return the factor by which padded channels increase the number of computed results."""
    out = problem.outputs[0]
    whole = isinstance(out, TensorType) and out.layout.block and out.size
    return math.prod(out.physical) / out.size if whole and isinstance(out, TensorType) else 1.0


def _follows(node: Node) -> bool:
    """Whether the node's data comes from a node of the same operation."""
    x = node.inputs[0]
    return x is not None and x.producer is not None and x.producer.op == node.op


def _pixels(problem: Problem) -> bool:
    """Whether the problem is a 1 x 1 convolution."""
    w = problem.input(1)
    return isinstance(w, TensorType) and math.prod(w.dims[2:]) == 1


def _between(plain: Problem, first: Layout, result: Layout, along: Sequence[int]) -> Problem:
    """Return the problem with its first input in layout ``first``, and results and other inputs in ``result``."""
    inside = plain.in_layout(result, along) if result != PLAIN else plain
    x = inside.inputs[0] if inside.inputs else None
    if first == PLAIN or not isinstance(x, TensorType):
        return inside
    return replace(inside, inputs=(x.with_layout(first), *inside.inputs[1:]))
