"""Selections and sums along an axis by torch, usually a few steps at the end of a network.

Without these solvers the host would run the steps, and split a recorded graph in two. A table of functions on logical
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.types import DType, TensorType

from ..base import Missing, Problem
from .base import Operation, VendorSolver
from .tensors import Function

_FLOAT = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


def _axis(problem: Problem, default: int) -> int:
    x = problem.inputs[0]
    assert isinstance(x, TensorType)
    return int(problem.attrs.get("axis", default)) % max(1, len(x.dims))


def _number(problem: Problem, i: int, default: int) -> int:
    """The value of a constant input with one element."""
    value = problem.value(i) if i < len(problem.main_inputs) else None
    return default if value is None else int(np.asarray(value).reshape(-1)[0])


def _arg(name: str) -> Function:
    def run(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
        axis, keep = _axis(problem, 0), bool(problem.attrs.get("keepdims", 1))
        if not problem.attrs.get("select_last_index", 0):
            return getattr(torch, name)(ins[0], axis, keep)
        return ins[0].shape[axis] - 1 - getattr(torch, name)(ins[0].flip(axis), axis, keep)

    return run


def _top(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    """TopK. Among equal elements the first ones win, because a stable sort keeps their order."""
    axis, out = _axis(problem, -1), problem.outputs[0]
    assert isinstance(out, TensorType)
    values, indices = torch.sort(ins[0], dim=axis, descending=bool(problem.attrs.get("largest", 1)), stable=True)
    return [part.narrow(axis, 0, out.dims[axis]) for part in (values, indices)]


def _cumulated(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    axis, backwards = _number(problem, 1, 0) % ins[0].dim(), bool(problem.attrs.get("reverse", 0))
    x = ins[0].flip(axis) if backwards else ins[0]
    made = torch.cumsum(x, axis, dtype=x.dtype)
    if problem.attrs.get("exclusive", 0):
        made = made.roll(1, axis)
        made.narrow(axis, 0, 1).zero_()
    return made.flip(axis) if backwards else made


def _gather_elements(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    axis = _axis(problem, 0)
    size = ins[0].shape[axis]
    # Indices outside are clamped, because a GPU kernel cannot raise.
    index = torch.where(ins[1] < 0, ins[1] + size, ins[1]).clamp(0, size - 1).to(torch.int64)
    return ins[0].gather(axis, index)


def _triangle(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    return (torch.triu if problem.attrs.get("upper", 1) else torch.tril)(ins[0], _number(problem, 1, 0))


def _local_norm(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    a, x = problem.attrs, ins[0].float()
    size, before = int(a["size"]), (int(a["size"]) - 1) // 2
    around = [0, 0] * (x.dim() - 2) + [before, size - 1 - before]
    total = torch.nn.functional.pad(x * x, around).unfold(1, size, 1).sum(-1)
    below = float(a.get("bias", 1.0)) + float(a.get("alpha", 1e-4)) / size * total
    return (x / below ** float(a.get("beta", 0.75))).to(ins[0].dtype)


def _padded(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    """Padding with elements of the input. Along each axis, every index of the result selects one of the input."""
    x, mode, rank = ins[0], problem.attrs["mode"], ins[0].dim()
    pads, axes = (None if (v := problem.value(i)) is None else [int(n) for n in v.reshape(-1)] for i in (1, 3))
    chosen = [a % rank for a in axes] if axes is not None else list(range(rank))
    assert pads is not None
    for k, axis in enumerate(chosen):
        head, tail, size = pads[k], pads[k + len(chosen)], x.shape[axis]
        if not head and not tail:
            continue
        at = torch.arange(-head, size + tail, device=x.device)
        if mode == "edge":
            at = at.clamp(0, size - 1)
        elif mode == "wrap":
            at = at % size
        else:
            around = max(1, 2 * (size - 1))
            at = at.abs() % around
            at = torch.where(at >= size, around - at, at)
        x = x.index_select(axis, at)
    return x


TABLE: Mapping[str, Function] = {
    "Pad": _padded,
    "ArgMax": _arg("argmax"),
    "ArgMin": _arg("argmin"),
    "TopK": _top,
    "CumSum": _cumulated,
    "GatherElements": _gather_elements,
    "Trilu": _triangle,
    "LRN": _local_norm,
}
#: inputs that must be constant
_NEEDED = {"Pad": (1, 3), "TopK": (1,), "CumSum": (1,), "Trilu": (1,)}


class Picking(VendorSolver):
    """The operations of `TABLE`, on torch."""

    id = "vendor.picking"
    ops = frozenset(TABLE)
    rank = 60

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x = problem.inputs[0]
        assert isinstance(x, TensorType)
        for i in _NEEDED.get(problem.op, ()):
            if i < len(problem.main_inputs) and problem.inputs[i] is not None and problem.value(i) is None:
                return Missing(f"input {i} is not constant")
        if problem.op == "Pad" and problem.attrs.get("mode", "constant") not in ("reflect", "edge", "wrap"):
            return "pads with what is there"
        if not x.size or not x.dims:
            return "takes tensors with axes and elements"
        if problem.op == "LRN" and x.dtype not in _FLOAT:
            return f"does not take {x.dtype}"
        return super().refuse(problem, target)

    def operation(self, problem: Problem) -> Operation:
        import torch

        function = TABLE[problem.op]
        return lambda inputs, outputs: function(torch, inputs, problem)


SOLVERS = (Picking(),)
