"""Products by cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...devices.base import Target
from ...ir.types import DType, TensorType
from ..base import Problem
from .base import VendorSolver

_DTYPES = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64})


class MatMul(VendorSolver):
    """Any shapes that MatMul takes."""

    id = "vendor.matmul"
    ops = frozenset({"MatMul"})
    dtypes = _DTYPES | {DType.BOOL, DType.INT32, DType.INT64}  # operands of epilogues
    rank = 40
    multiplies = True
    version = "1.1"
    writes = True

    def refuse(self, problem: Problem, target: Target) -> str | None:
        first = problem.input(0)
        assert isinstance(first, TensorType)
        if first.dtype not in _DTYPES:
            return f"does not multiply {first.dtype}"
        return super().refuse(problem, target)

    def operation(self, problem: Problem) -> Callable[[Sequence[Any], Sequence[Any] | None], Any]:
        import torch

        def run(inputs: Sequence[Any], outputs: Sequence[Any] | None) -> Any:
            return torch.matmul(inputs[0], inputs[1], out=None if outputs is None else outputs[0])

        return run


class Gemm(VendorSolver):
    """With the third operand added by the library."""

    id = "vendor.gemm"
    ops = frozenset({"Gemm"})
    dtypes = _DTYPES
    rank = 40
    multiplies = True
    version = "1.1"

    def operation(self, problem: Problem) -> Callable[[Sequence[Any], Sequence[Any] | None], Any]:
        import torch

        attrs = problem.attrs
        alpha, beta = float(attrs.get("alpha", 1.0)), float(attrs.get("beta", 1.0))
        turn = [bool(attrs.get(name, 0)) for name in ("transA", "transB")]

        def run(inputs: Sequence[Any], outputs: Sequence[Any] | None) -> Any:
            a, b = (x.t() if turned else x for x, turned in zip(inputs[:2], turn, strict=True))
            if len(inputs) > 2 and inputs[2] is not None:
                return torch.addmm(inputs[2], a, b, beta=beta, alpha=alpha)
            made = torch.mm(a, b)
            return made if alpha == 1.0 else made * alpha

        return run


SOLVERS = (MatMul(), Gemm())
