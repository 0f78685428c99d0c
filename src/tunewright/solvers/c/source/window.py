"""Geometry of sliding windows for kernels: one to three spatial axes become exactly three."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tunewright.ir.graph import Fused
from tunewright.ir.symbolic import SymInt, greater, lesser
from tunewright.ir.types import TensorType
from tunewright.ops.microsoft.common import PARAMETERS
from tunewright.ops.onnx.conv import transposed_size
from tunewright.ops.windows import spread, windows
from tunewright.solvers.base import Problem, tensor

Triple: TypeAlias = tuple[int, int, int]

FUSED_CONV = "com.microsoft::FusedConv"
CONVOLUTIONS = frozenset({"Conv", FUSED_CONV})


@dataclass(frozen=True)
class Window:
    """Depth, height and width of each property of a window. Axes that a problem lacks become leading axes of size 1.

    Tap k of output position o reads the input at ``o * stride - head + k * dilation``. In a transposed convolution the
    roles are exchanged: tap k of input position i adds to the output at ``i * stride - head + k * dilation``.
    """

    kernel: Triple
    stride: Triple
    dilation: Triple
    #: padding at the beginning, and at the end without the extension of ceil_mode
    head: Triple
    tail: Triple
    input: Triple
    output: Triple

    @staticmethod
    def of(problem: Problem) -> Window:
        """The window of a static Conv, ConvTranspose or pooling that `why_not` accepts."""
        source, result = spatial(problem.input(0)), spatial(problem.outputs[0])
        attrs, rank = problem.attrs, len(source)
        if problem.op == "ConvTranspose":
            kernel = spatial(problem.input(1))
            cut = [transposed_size(source[k], kernel[k], attrs, rank, k) for k in range(rank)]
            strides, dilations = spread(attrs, "strides", rank), spread(attrs, "dilations", rank)
            head, tail = tuple(begin for _, begin in cut), (0,) * rank
        elif problem.op.startswith("Global"):
            kernel, strides, dilations, head, tail = source, (1,) * rank, (1,) * rank, (0,) * rank, (0,) * rank
        else:
            kernel = spatial(problem.input(1)) if problem.op in CONVOLUTIONS else tuple(attrs["kernel_shape"])
            found = windows(source, kernel, attrs)
            strides, dilations, head, tail = found.strides, found.dilations, found.head, found.tail
        return Window(
            _triple(kernel, 1), _triple(strides, 1), _triple(dilations, 1), _triple(head, 0), _triple(tail, 0),
            _triple(source, 1), _triple(result, 1),
        )  # fmt: skip

    @property
    def taps(self) -> int:
        """Number of elements under the window."""
        return math.prod(self.kernel)

    @property
    def pointwise(self) -> bool:
        """Whether the window has one tap on each element, in order. Then the spatial axes act as one long axis."""
        return self.taps == 1 and self.stride == (1, 1, 1) and self.input == self.output and not any(self.head)

    def flat(self) -> Window:
        """The window with its spatial axes merged into one, if it is pointwise; else the window unchanged."""
        if not self.pointwise:
            return self
        size = (1, 1, math.prod(self.input))
        return replace(self, input=size, output=size)

    def inside(self, axis: int) -> tuple[int, int]:
        """The output positions [begin, end) along an axis whose windows lie entirely inside the input."""
        stride, head, reach = self.stride[axis], self.head[axis], (self.kernel[axis] - 1) * self.dilation[axis]
        begin = greater(0, -(-head // stride))
        end = lesser(self.output[axis], (self.input[axis] - 1 - reach + head) // stride + 1)
        return (begin, end) if begin < end else (0, 0)


def why_not(problem: Problem) -> str | None:
    """None when `Window.of` can describe the problem once its shapes are known, else the reason."""
    type = problem.input(0)
    if not isinstance(type, TensorType) or not isinstance(problem.outputs[0], TensorType):
        return "nothing is known of the input or the output"
    rank = type.rank
    if rank is not None and not 3 <= rank <= 5:
        return f"{rank - 2} spatial axes, where one to three are needed"
    return None


def spatial(type: object) -> tuple[int, ...]:
    """Dimensions behind batch and channels."""
    assert isinstance(type, TensorType)
    return type.dims[2:]


def _triple(values: Sequence[Any], fill: int) -> Triple:
    depth, height, width = [fill] * (3 - len(values)) + [v if isinstance(v, SymInt) else int(v) for v in values]
    return depth, height, width  # type: ignore[return-value]


def as_conv(problem: Problem) -> Problem:
    """A FusedConv as a Conv, with its residual and activation as the first steps of the epilogue.

    Inputs keep their numbers. Other problems are returned unchanged.
    """
    if problem.op != FUSED_CONV:
        return problem
    attrs = dict(problem.attrs)
    activation, params = str(attrs.pop("activation", "")), attrs.pop("activation_params", ())
    steps: list[Fused] = []
    operands = problem.operands
    if problem.input(3) is not None:
        steps.append(Fused("Add", (~0, 3)))
        operands += 1
    if activation:
        named = dict(zip(PARAMETERS.get(activation, ()), params, strict=False))
        steps.append(Fused(activation, (~len(steps),), named))
    moved = [replace(s, args=tuple(i if i >= 0 else ~(~i + len(steps)) for i in s.args)) for s in problem.epilogue]
    return replace(problem, op="Conv", attrs=attrs, operands=operands, epilogue=(*steps, *moved))


def why_not_fused(problem: Problem) -> str | None:
    """None when `as_conv` can express everything that a FusedConv does, else the reason."""
    if problem.op == FUSED_CONV and problem.attrs.get("activation") == "Clip":
        return "the bounds of a Clip inside FusedConv are attributes"
    return None


def groups(problem: Problem) -> tuple[int, int, int]:
    """(groups, input channels of one, output channels of one) of a static convolution."""
    count = int(problem.attrs.get("group", 1))
    return count, tensor(problem.inputs[0]).dims[1] // count, tensor(problem.outputs[0]).dims[1] // count
