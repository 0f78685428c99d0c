"""Products by cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tunewright.devices.base import Target
from tunewright.ir.types import DType, TensorType

from ..base import Problem
from .base import Operation, VendorSolver

_DTYPES = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64})


class VendorMatMul(VendorSolver):
    """MatMul of any shapes."""

    id = "vendor.matmul"
    ops = frozenset({"MatMul"})
    dtypes = _DTYPES | {DType.BOOL, DType.INT32, DType.INT64}  # operands of epilogues
    rank = 40
    multiplies = True
    version = "1.2"
    writes = True

    def refuse(self, problem: Problem, target: Target) -> str | None:
        first = problem.input(0)
        assert isinstance(first, TensorType)
        if first.dtype not in _DTYPES:
            return f"does not multiply {first.dtype}"
        return super().refuse(problem, target)

    def operation(self, problem: Problem) -> Operation:
        import torch

        def run(inputs: Sequence[Any], outputs: Sequence[Any] | None) -> Any:
            return torch.matmul(inputs[0], inputs[1], out=None if outputs is None else outputs[0])

        def with_bias(inputs: Sequence[Any], outputs: Sequence[Any] | None) -> Any:
            a, b, bias = inputs
            made = a.new_empty(*a.shape[:-1], b.shape[1]) if outputs is None else outputs[0]
            torch.addmm(bias, a.reshape(-1, a.shape[-1]), b, out=made.view(-1, made.shape[-1]))
            return made

        return run if self.rest(problem) is problem else with_bias

    def rest(self, problem: Problem) -> Problem:
        """The problem without a leading bias, which cuBLASLt adds."""
        return _without_bias(problem) or problem


def _without_bias(problem: Problem) -> Problem | None:
    """The problem without its first step, the sum of the product and a vector; None where there is no such sum."""
    x, w, bias = (*problem.inputs, None)[:3]
    if not problem.epilogue or len(problem.main_inputs) != 2 or not isinstance(bias, TensorType):
        return None
    assert isinstance(x, TensorType) and isinstance(w, TensorType)
    first, *others = problem.epilogue
    if first.op != "Add" or set(first.args) != {~0, 2} or any(~0 in step.args for step in others):
        return None
    if len(w.dims) != 2 or len(x.dims) < 2 or any(size < 1 for size in (x.size, w.size)):
        return None
    if bias.dims != w.dims[1:] or bias.dtype is not x.dtype:
        return None
    shifted = tuple(replace(step, args=tuple(i + 1 if i < 0 else i for i in step.args)) for step in others)
    return replace(problem, epilogue=shifted)


class VendorGemm(VendorSolver):
    """Gemm. The library also adds the third operand."""

    id = "vendor.gemm"
    ops = frozenset({"Gemm"})
    dtypes = _DTYPES
    rank = 40
    multiplies = True
    version = "1.1"

    def operation(self, problem: Problem) -> Operation:
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


SOLVERS = (VendorMatMul(), VendorGemm())
