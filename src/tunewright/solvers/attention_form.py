"""The canonical form of an attention: sizes, strides and masks of ONNX's Attention and MultiHeadAttention.

MultiHeadAttention belongs to the domain com.microsoft.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..ir.graph import Fused
from ..ir.symbolic import greater, lesser
from ..ir.types import DType, TensorType
from ..ops.internal import strided_attention
from ..ops.onnx.attention import NAN_ROWS
from .base import Problem, tensor

MULTI_HEAD = "com.microsoft::MultiHeadAttention"
OPS = frozenset({"Attention", MULTI_HEAD})
#: For kernels that read queries, keys and values where `Heads` and ``AttentionForm.sources`` say.
ANYWHERE = OPS | {strided_attention.STRIDED}
#: more than the length of any sequence
UNBOUNDED = 1 << 29
FLOATS = frozenset({DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16})
#: Types to which a model may ask to round scores and weights; wider types need no rounding.
_ROUNDED = {DType.FLOAT16: "f16", DType.BFLOAT16: "bf16", DType.FLOAT32: "", DType.FLOAT64: ""}


@dataclass(frozen=True)
class Heads:
    """The strides of a tensor [batch, heads, length, size]; the last stride is 1."""

    batch: int
    head: int
    row: int
    #: its first element, since it may be a part of a larger tensor
    start: int = 0

    @staticmethod
    def of(type: TensorType, heads: int) -> Heads:
        """The strides of a whole tensor: [batch, heads, length, size] or [batch, length, heads * size]."""
        dims = type.dims
        if len(dims) == 4:
            return Heads(dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3])
        return Heads(dims[1] * dims[2], dims[2] // heads, dims[2])


@dataclass(frozen=True)
class Mask:
    """The addend of the scores, broadcast to [batch, heads, queries]; keys from ``columns`` on are hidden."""

    index: int
    batch: int
    head: int
    row: int
    columns: int

    @staticmethod
    def of(index: int, type: TensorType, keys: int) -> Mask:
        dims = (1, 1, 1, *type.dims)[-4:]
        row, head, batch = dims[3], dims[3] * dims[2], dims[3] * dims[2] * dims[1]
        batch, head, row = (s if d > 1 else 0 for s, d in ((batch, dims[0]), (head, dims[1]), (row, dims[2])))
        return Mask(index, batch, head, row, lesser(dims[3], keys))


@dataclass(frozen=True)
class AttentionForm:
    """One attention. A query sees the keys from ``left`` positions before to ``right`` positions after its own."""

    batch: int
    heads: int
    groups: int  # heads of keys and values
    queries: int
    past: int
    keys: int  # new ones
    size: int
    width: int  # of a value
    q: Heads
    k: Heads
    v: Heads
    y: Heads
    scale: float
    softcap: float
    left: int
    right: int
    mask: Mask | None
    #: the input with the number of valid keys of each batch, or None
    valid: int | None
    #: the content of output 3: 0 the products, 1 capped, 2 masked, 3 the weights
    shown: int
    #: whether a row whose mask hides everything gives zeros (else NaN)
    forgiving: bool
    #: the narrow float type to which scores and weights are rounded, or nothing
    rounding: str
    #: the inputs that hold queries, keys and values
    sources: tuple[int, int, int] = (0, 1, 2)

    @property
    def total(self) -> int:
        return self.past + self.keys

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.heads * self.queries * self.total * (self.size + self.width)


def separate(problem: Problem) -> Problem:
    """A strided attention as its main operation, with queries, keys and values as separate tensors.

    Other problems are returned unchanged.
    """
    if problem.op != strided_attention.STRIDED:
        return problem
    attrs, more = problem.attrs, 3 - strided_attention.count(problem.attrs)

    def shifted(step: Fused) -> Fused:
        return Fused(step.op, tuple(i if i < 0 else i + more for i in step.args), step.attrs)

    types: list[TensorType | None] = [t if isinstance(t, TensorType) else None for t in problem.inputs]
    parts = strided_attention.separate(types, attrs, strided_attention.part_type(str(attrs["main"])))
    return Problem(
        str(attrs["main"]), tuple(parts), problem.outputs, strided_attention.main_attrs(attrs),
        tuple(shifted(s) for s in problem.epilogue), problem.operands,
        (*(problem.constant[int(i)] for i in attrs["sources"]), *problem.constant[3 - more :]),
        tuple((i + more, value) for i, value in problem.values),
    )  # fmt: skip


def why_not(problem: Problem) -> str | None:
    """None when `form` can describe the problem, else the reason. Types may be open."""
    if problem.op == strided_attention.STRIDED and int(problem.attrs["order"][-1]) != 3:
        return "the elements of a value do not lie side by side in the result"
    problem = separate(problem)
    q, k, v = (problem.input(i) for i in range(3))
    for type in (q, k, v):
        if not isinstance(type, TensorType):
            return "queries, keys and values must all be given"
        if type.dtype not in FLOATS:
            return f"does not take {type.dtype}"
    assert isinstance(q, TensorType) and isinstance(k, TensorType) and isinstance(v, TensorType)
    if q.dtype is not k.dtype or (DType.FLOAT64 in (q.dtype, v.dtype) and q.dtype is not v.dtype):
        return f"mixes {q.dtype}, {k.dtype} and {v.dtype}"
    return _multi_head_why_not(problem) if problem.op == MULTI_HEAD else _attention_why_not(problem)


def _attention_why_not(problem: Problem) -> str | None:
    mask, valid = problem.input(3), problem.input(6)
    if isinstance(mask, TensorType) and mask.dtype not in FLOATS | {DType.BOOL}:
        return f"a mask of {mask.dtype}"
    if isinstance(valid, TensorType) and valid.dtype is not DType.INT64:
        return f"lengths of {valid.dtype}"
    if (problem.input(4) is None) != (problem.input(5) is None):
        return "past keys and values come together"
    if valid is not None and problem.input(4) is not None:
        return "lengths and past keys exclude each other"
    precision = problem.attrs.get("softmax_precision")
    if precision is not None and DType.of_onnx(int(precision)) not in _ROUNDED:
        return f"softmax in {DType.of_onnx(int(precision))}"
    return None


def _multi_head_why_not(problem: Problem) -> str | None:
    names = {3: "a bias", 4: "a key padding mask", 6: "past keys", 7: "past values", 8: "a shared cache", 9: "beams"}
    for i, name in names.items():
        if problem.input(i) is not None:
            return f"does not take {name}"
    if problem.attrs.get("unidirectional", 0):
        return "does not mask the future of MultiHeadAttention"
    ranks = {t.rank for t in problem.main_inputs[:3] if isinstance(t, TensorType) and t.shape is not None}
    return "takes queries, keys and values of rank 3" if ranks - {3} else None


def form(problem: Problem) -> AttentionForm:
    """The form of a static problem that `why_not` accepts."""
    if problem.op == strided_attention.STRIDED:
        return _strided_form(problem)
    attrs: Mapping[str, Any] = problem.attrs
    q, k, v = (tensor(problem.inputs[i]) for i in range(3))
    standard = problem.op == "Attention"
    heads = q.dims[1] if len(q.dims) == 4 else int(attrs["q_num_heads" if standard else "num_heads"])
    groups = k.dims[1] if len(k.dims) == 4 else int(attrs["kv_num_heads" if standard else "num_heads"])
    size = q.dims[-1] if len(q.dims) == 4 else q.dims[2] // heads
    width = v.dims[-1] if len(v.dims) == 4 else v.dims[2] // groups
    queries, keys = q.dims[-2], k.dims[-2]
    given = problem.input(4) if standard else None
    past = tensor(given).dims[2] if given is not None else 0
    at = 3 if standard else 5
    mask = problem.input(at)
    left, right = int(attrs.get("left_window_size", -1)), int(attrs.get("right_window_size", -1))
    ahead = [UNBOUNDED, *([right] if right >= 0 else []), *([0] if attrs.get("is_causal", 0) else [])]
    precision = attrs.get("softmax_precision") if standard else None
    y = Heads(queries * heads * width, width, heads * width)
    if len(q.dims) == 4:
        y = Heads(heads * queries * width, queries * width, width)
    return AttentionForm(
        q.dims[0], heads, groups, queries, past, keys, size, width,
        Heads.of(q, heads), Heads.of(k, groups), Heads.of(v, groups), y,
        scale=float(attrs.get("scale") or 1 / math.sqrt(greater(size, 1))),
        softcap=float(attrs.get("softcap", 0.0)) if standard else 0.0,
        left=left if left >= 0 else UNBOUNDED, right=min(ahead),
        mask=None if mask is None else Mask.of(at, tensor(mask), past + keys),
        valid=6 if standard and problem.input(6) is not None else None,
        shown=int(attrs.get("qk_matmul_output_mode", 0)) if standard else 2,
        forgiving=standard and not attrs.get(NAN_ROWS, 0),
        rounding="" if precision is None else _ROUNDED[DType.of_onnx(int(precision))],
    )  # fmt: skip


def _strided_form(problem: Problem) -> AttentionForm:
    """The form of the main operation, with the strides and inputs of the tensors that contain its parts."""
    plain, attrs = form(separate(problem)), problem.attrs
    less = 3 - strided_attention.count(attrs)
    q, k, v = (Heads(steps[0], steps[1], steps[2], start) for _, start, steps in strided_attention.places(attrs))
    first, second, third = (int(i) for i in attrs["sources"])
    steps, step = [0] * 4, 1
    for axis, size in zip(reversed(attrs["order"]), reversed(strided_attention.result_shape(attrs)), strict=True):
        steps[int(axis)], step = step, step * size
    return replace(
        plain, q=q, k=k, v=v, y=Heads(steps[0], steps[1], steps[2]), sources=(first, second, third),
        mask=None if plain.mask is None else replace(plain.mask, index=plain.mask.index - less),
        valid=None if plain.valid is None else plain.valid - less,
    )  # fmt: skip
