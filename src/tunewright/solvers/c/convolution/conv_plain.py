"""Convolutions in the plain layout: any rank, group, stride, dilation and padding, weights constant or not."""

from __future__ import annotations

from collections.abc import Mapping

from tunewright.devices.base import Target
from tunewright.ir.types import DType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Packing, Problem

from ..source import epilogue, window
from ..source.base import CSolver, both
from ..source.emit import EmittedLaunch
from ..source.window import as_conv
from . import conv_plan, conv_slab


class ConvPlain(CSolver):
    """Computes tiles of output channels times positions in registers (see `conv_slab`)."""

    family = "conv_plain"
    ops = window.CONVOLUTIONS
    dtypes = frozenset({DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16})
    rank = 70

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return window.why_not(problem) or window.why_not_fused(problem) or epilogue.why_not(as_conv(problem))

    def space(self, problem: Problem, target: Target) -> Space:
        return conv_plan.space(target)

    def default(self, problem: Problem, target: Target) -> Config:
        return conv_plan.default(problem, target)

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        if not problem.constant[1]:
            return {}
        problem = as_conv(problem)
        return {1: conv_plan.packing(problem, conv_plan.plan(problem, config, target))}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        problem = as_conv(problem)
        return conv_slab.calls(problem, conv_plan.plan(problem, config, target), config, target, self.specialise)


SOLVERS = both(ConvPlain)
