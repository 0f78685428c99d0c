"""Numbers and convolutions for tests of CUDA kernels. Import it before Triton: see interpreter.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance import interpreter as interpreter
from tunewright.ir.types import NHWC, Layout
from tunewright.solvers.base import Solver, solvers
from tunewright.testing.kernelcheck import Case

F16 = np.float16


class Made:
    """Inputs from a generator of a module's own: the same in every run, whatever other modules take."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.rng = np.random.default_rng(0)
        self._dtype = dtype

    def normal(self, *shape: int, dtype: Any = None) -> np.ndarray[Any, Any]:
        return self.rng.standard_normal(shape).astype(dtype or self._dtype)

    def conv(
        self, shape: tuple[int, ...], filters: int, *taps: int, bias: bool = True, layout: Layout = NHWC,
        dtype: Any = F16, epilogue: Any = (), operands: Any = (), **attrs: Any,
    ) -> Case:  # fmt: skip
        """1x1 without ``taps``."""
        kernel = taps or (1, 1)
        channels = shape[1] // attrs.get("group", 1)
        weights = (self.normal(filters, channels, *kernel) / np.sqrt(channels * np.prod(kernel))).astype(dtype)
        inputs = [self.normal(*shape, dtype=dtype), weights, self.normal(filters, dtype=dtype) if bias else None]
        return Case(
            "Conv", [*inputs, *operands], attrs, constant=frozenset({1, 2}), epilogue=epilogue, operands=len(operands),
            layouts=(layout, layout),
        )  # fmt: skip

    def matmul(
        self, left: tuple[int, ...], right: tuple[int, ...], dtype: Any = F16, epilogue: Any = (), operands: Any = (),
        weights: bool = True,
    ) -> Case:  # fmt: skip
        """``weights``: the right one is constant."""
        b = (self.normal(*right) / np.sqrt(right[-2])).astype(dtype)
        return Case(
            "MatMul", [self.normal(*left, dtype=dtype), b, *operands], constant=frozenset({1} if weights else ()),
            epilogue=epilogue, operands=len(operands),
        )  # fmt: skip


def solver(name: str) -> Solver:
    return next(s for s in solvers() if s.id == name)
