"""Operations that torch runs as one of its own kernels: pooling, normalisation, reduction, attention, moves of data.

A table of functions on logical tensors. Generated kernels compete with them and are measured against them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.types import PLAIN, DType, TensorType
from tunewright.ops.internal import strided_attention
from tunewright.ops.internal.reorder import REORDER
from tunewright.ops.windows import windows

from .. import attention_form
from ..base import Problem
from .base import Operation, VendorSolver

#: (torch, logical inputs, problem) -> the result, or several results
Function: TypeAlias = Callable[[Any, Sequence[Any], Problem], Any]

_FLOAT = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})


def _out(problem: Problem, i: int = 0) -> TensorType:
    type = problem.outputs[i]
    assert isinstance(type, TensorType)
    return type


def _in(problem: Problem, i: int = 0) -> TensorType:
    type = problem.inputs[i]
    assert isinstance(type, TensorType)
    return type


def _ints(problem: Problem, i: int) -> list[int] | None:
    """The elements of a constant integer input; None where it is absent or not constant."""
    value = problem.value(i) if i < len(problem.main_inputs) else None
    return None if value is None else [int(v) for v in np.asarray(value).reshape(-1)]


def _same(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    return ins[0]


def _max_pool(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    x = _in(problem)
    win = windows(x.dims[2:], problem.attrs["kernel_shape"], problem.attrs)
    pads = [p for pair in reversed(win.pads(x.dims[2:])) for p in pair]
    data = torch.nn.functional.pad(ins[0], pads, value=-math.inf) if any(pads) else ins[0]
    pool = (torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)[len(win.kernel) - 1]
    return pool(data, win.kernel, win.strides, 0, win.dilations)


def _global_average(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    return ins[0].mean(dim=tuple(range(2, ins[0].dim())), keepdim=True)


def _softmax(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    return torch.softmax(ins[0], int(problem.attrs.get("axis", -1)))


def _layer_norm(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    axis = int(problem.attrs.get("axis", -1)) % ins[0].dim()
    shape = ins[0].shape[axis:]
    bias = ins[2] if len(ins) > 2 and ins[2] is not None else None
    scale = ins[1].expand(shape)
    return torch.nn.functional.layer_norm(
        ins[0], shape, scale, None if bias is None else bias.expand(shape), float(problem.attrs.get("epsilon", 1e-5))
    )


def _reduce(name: str) -> Function:
    def run(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
        axes = _ints(problem, 1) or list(range(ins[0].dim()))
        return getattr(torch, name)(ins[0], dim=axes, keepdim=bool(problem.attrs.get("keepdims", 1)))

    return run


def _transpose(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    return ins[0].permute(problem.attrs.get("perm") or list(reversed(range(ins[0].dim()))))


def _concat(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    return torch.cat(list(ins), int(problem.attrs["axis"]))


def _split(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    axis = int(problem.attrs.get("axis", 0))
    return list(torch.split(ins[0], [_out(problem, i).dims[axis] for i in range(len(problem.outputs))], axis))


def _gather(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    axis = int(problem.attrs.get("axis", 0)) % ins[0].dim()
    size = ins[0].shape[axis]
    index = torch.where(ins[1] < 0, ins[1] + size, ins[1]).clamp(0, size - 1)
    picked = ins[0].index_select(axis, index.reshape(-1))
    return picked.reshape(_out(problem).dims)


def _slice(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    starts, ends = _ints(problem, 1) or [], _ints(problem, 2) or []
    axes = _ints(problem, 3) or list(range(len(starts)))
    steps = _ints(problem, 4) or [1] * len(starts)
    at = [slice(None)] * ins[0].dim()
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        at[axis] = slice(start, end, step)
    return ins[0][tuple(at)]


def _expand(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    return ins[0].expand(_out(problem).dims)


def _reshape(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    return ins[0].reshape(_out(problem).dims)


def _strided_attention(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    def part(x: Any, place: strided_attention.Place) -> Any:
        shape, start, strides = place
        return x.as_strided(shape, strides, x.storage_offset() + start)

    given = strided_attention.separate(ins, problem.attrs, part)
    return _attention(torch, given, attention_form.separate(problem)).permute(problem.attrs["order"])


def _attention(torch: Any, ins: Sequence[Any], problem: Problem) -> Any:
    attrs, out = problem.attrs, _out(problem)
    heads, shared = int(attrs.get("q_num_heads", 0)), int(attrs.get("kv_num_heads", 0))
    q, k, v = ins[:3]
    flat = q.dim() == 3
    if flat:
        q, k, v = (x.reshape(x.shape[0], x.shape[1], n, -1).transpose(1, 2)
                   for x, n in ((q, heads), (k, shared), (v, shared)))  # fmt: skip
    mask = ins[3] if len(ins) > 3 else None
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(q.dtype)
    made = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=bool(attrs.get("is_causal")), scale=attrs.get("scale") or None,
        enable_gqa=k.shape[1] != q.shape[1],
    )  # fmt: skip
    return made.transpose(1, 2).reshape(out.dims) if flat else made


TABLE: Mapping[str, Function] = {
    REORDER: _same,
    "Identity": _same,
    "MaxPool": _max_pool,
    "GlobalAveragePool": _global_average,
    "Softmax": _softmax,
    "LayerNormalization": _layer_norm,
    "ReduceMean": _reduce("mean"),
    "ReduceSum": _reduce("sum"),
    "ReduceMax": _reduce("amax"),
    "ReduceMin": _reduce("amin"),
    "Transpose": _transpose,
    "Concat": _concat,
    "Split": _split,
    "Gather": _gather,
    "Slice": _slice,
    "Expand": _expand,
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
    "Attention": _attention,
    strided_attention.STRIDED: _strided_attention,
}
#: inputs that must be constant
_NEEDED = {"Slice": (1, 2, 3, 4), "ReduceMean": (1,), "ReduceSum": (1,), "ReduceMax": (1,), "ReduceMin": (1,)}
_FLOATS_ONLY = frozenset(
    {
        "MaxPool",
        "GlobalAveragePool",
        "Softmax",
        "LayerNormalization",
        "ReduceMean",
        "Attention",
        strided_attention.STRIDED,
    }
)
#: operations that work on the physical order as well as on the plain one
_ANY_LAYOUT = frozenset({REORDER, "Identity", "MaxPool", "GlobalAveragePool", "Concat", "ReduceMean"})


class VendorOperations(VendorSolver):
    """The operations of `TABLE`, on torch."""

    id = "vendor.tensors"
    ops = frozenset(TABLE)
    layouts = frozenset({PLAIN.name, "nhwc"})
    rank = 60
    version = "1.1"

    def refuse(self, problem: Problem, target: Target) -> str | None:
        op, count = problem.op, len(problem.main_inputs)
        types = [t for t in (*problem.inputs, *problem.outputs) if isinstance(t, TensorType)]
        if op not in _ANY_LAYOUT and any(t.layout != PLAIN for t in types):
            return "works on plain tensors"
        if op in _FLOATS_ONLY and _in(problem).dtype not in _FLOAT:
            return f"does not take {_in(problem).dtype}"
        for i in _NEEDED.get(op, ()):
            if i < count and problem.inputs[i] is not None and problem.value(i) is None:
                return f"input {i} is not constant"
        if op == "Slice" and any(step < 1 for step in _ints(problem, 4) or [1]):
            return "has a step below 1"
        if op.startswith("Reduce") and not _ints(problem, 1) and problem.attrs.get("noop_with_empty_axes"):
            return "reduces nothing"
        if op in ("Attention", strided_attention.STRIDED) and (
            reason := _why_not_attention(attention_form.separate(problem))
        ):
            return reason
        if op in ("MaxPool", "LayerNormalization") and len(problem.outputs) > 1:
            return "makes one output"
        return super().refuse(problem, target)

    def operation(self, problem: Problem) -> Operation:
        import torch

        function = TABLE[problem.op]
        return lambda inputs, outputs: function(torch, inputs, problem)


def _why_not_attention(problem: Problem) -> str | None:
    if problem.op != "Attention":
        return f"does not know {problem.op}"
    attrs, mask, k = problem.attrs, problem.input(3), _in(problem, 1)
    if any(t is not None for t in problem.main_inputs[4:]) or len(problem.outputs) > 1:
        return "has no past and no lengths, and makes one output"
    if isinstance(mask, TensorType) and (attrs.get("is_causal") or mask.dims[-1] != k.dims[-2]):
        return "takes a mask of all keys, or none"
    odd = {name for name in ("softcap", "qk_matmul_output_mode", "softmax_precision") if attrs.get(name)}
    odd |= {name for name in ("left_window_size", "right_window_size") if attrs.get(name, -1) >= 0}
    return f"does not know {', '.join(sorted(odd))}" if odd else None


SOLVERS = (VendorOperations(),)
