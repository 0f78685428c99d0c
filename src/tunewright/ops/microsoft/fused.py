"""Convolutions and matrix products with fused operators, as the optimizer of ONNX Runtime writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, Shape, TensorType, Type

from .. import batch_rules
from ..base import Array, Attrs, Operand, Operands, OpSpec
from ..numeric import wide
from ..onnx.matmul import matmul_shape
from ..shapes import given, optional, tensor, value
from .common import (
    MS,
    activate,
    fast_gelu,
    heavy,
    infer,
    permuted,
    product_flops,
    retyped,
    run,
    to_first,
    to_last,
    without,
)

FUSION = ("activation", "activation_params")


def _conv(inputs: Sequence[Any], attrs: Attrs, last: bool = False, last_weights: bool = False) -> Array:
    """activation(conv(x, w) + bias + residual), channels first or last."""
    x, w, residual = inputs[0], inputs[1], optional(inputs, 3)
    if last:
        x = x.transpose(to_first(x.ndim))
    if last_weights:
        w = w.transpose(to_first(w.ndim))
    y = run("Conv", [x, w, optional(inputs, 2)], without(attrs, *FUSION))
    if last:
        y = np.ascontiguousarray(y.transpose(to_last(y.ndim)))
    if residual is not None:
        y = y + residual
    return activate(str(attrs.get("activation", "")), y, attrs.get("activation_params", ()))


def _infer_conv(operands: Operands, attrs: Attrs, last: bool = False, last_weights: bool = False) -> TensorType:
    taken = list(operands[:3])
    if last:
        taken = retyped(taken, 0, permuted(tensor(operands, 0), to_first))
    if last_weights:
        taken = retyped(taken, 1, permuted(tensor(operands, 1), to_first))
    t = infer("Conv", taken, without(attrs, *FUSION))
    return permuted(t, to_last) if last else t


def _conv_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    w = inputs[1]
    assert w is not None
    return 2.0 * outputs[0].size * (w.size / max(w.dims[0], 1))


def _transpose(x: Array, last_two: int, batch: int) -> Array:
    """Transpose the matrix if ``last_two``. ``batch`` first moves the leading batch dimension next to the matrix."""
    if batch and x.ndim > 2:
        x = np.moveaxis(x, 0, -2)
    return x.swapaxes(-1, -2) if last_two and x.ndim > 1 else x


def _transposed(shape: Shape | None, last_two: int, batch: int) -> Shape | None:
    if shape is None:
        return None
    dims = list(shape)
    if batch and len(dims) > 2:
        dims.insert(len(dims) - 2, dims.pop(0))
    if last_two and len(dims) > 1:
        dims[-1], dims[-2] = dims[-2], dims[-1]
    return tuple(dims)


def _matmul(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    a = _transpose(inputs[0], attrs.get("transA", 0), attrs.get("transBatchA", 0))
    b = _transpose(inputs[1], attrs.get("transB", 0), attrs.get("transBatchB", 0))
    y = np.asarray(np.matmul(wide(a), wide(b)))
    alpha = attrs.get("alpha", 1.0)
    if alpha != 1.0:
        y = y * y.dtype.type(alpha)
    named = {k.removeprefix("activation_"): v for k, v in attrs.items() if k.startswith("activation_")}
    return [activate(str(attrs.get("activation", "")), np.asarray(y), attrs=named).astype(inputs[0].dtype, copy=False)]


def _infer_matmul(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    a, b = tensor(operands, 0), tensor(operands, 1)
    left = _transposed(a.shape, attrs.get("transA", 0), attrs.get("transBatchA", 0))
    right = _transposed(b.shape, attrs.get("transB", 0), attrs.get("transBatchB", 0))
    return [TensorType(a.dtype, matmul_shape(left, right))]


def _matmul_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    a = inputs[0]
    assert a is not None
    shape = _transposed(a.shape, attrs.get("transA", 0), attrs.get("transBatchA", 0)) or (1,)
    return 2.0 * outputs[0].size * (shape[-1] if isinstance(shape[-1], int) else 1)


GEMM = ("alpha", "beta", "transA", "transB")


def _gemm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    y = run("Gemm", inputs, {k: attrs[k] for k in GEMM if k in attrs})
    named = {k.removeprefix("activation_"): v for k, v in attrs.items() if k.startswith("activation_")}
    return [activate(str(attrs.get("activation", "")), y, attrs=named)]


def _infer_gemm(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [infer("Gemm", operands, {k: attrs[k] for k in GEMM if k in attrs})]


def _gemm_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    a = inputs[0]
    assert a is not None
    return 2.0 * outputs[0].size * a.dims[0 if attrs.get("transA", 0) else 1]


def _gemm_fast_gelu(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    y = np.matmul(wide(inputs[0]), wide(inputs[1]))
    if optional(inputs, 2) is not None:
        y = y + wide(inputs[2])
    return [fast_gelu(np.asarray(y)).astype(inputs[0].dtype, copy=False)]


def _nhwc_max_pool(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x = inputs[0]
    y = run("MaxPool", [np.ascontiguousarray(x.transpose(to_first(x.ndim)))], attrs)
    return [np.ascontiguousarray(y.transpose(to_last(y.ndim)))]


def _infer_nhwc_max_pool(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t = infer("MaxPool", [Operand(permuted(tensor(operands, 0), to_first))], attrs)
    return [permuted(t, to_last)]


def _with_pads(attrs: Attrs, pads: Array | None) -> dict[str, Any]:
    return dict(attrs) if pads is None else {**attrs, "pads": tuple(int(p) for p in pads.reshape(-1))}


def _conv_transpose(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    return [run("ConvTranspose", [inputs[0], inputs[1], optional(inputs, 3)], _with_pads(attrs, optional(inputs, 2)))]


def _infer_conv_transpose(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    pads = value(operands, 2)
    if given(operands, 2) and pads is None:
        x, w = tensor(operands, 0), tensor(operands, 1)
        if x.shape is None or w.shape is None:
            return [TensorType(x.dtype)]
        group, out = attrs.get("group", 1), w.shape[1]
        channels: Dim = out * group if isinstance(out, WHOLE) else None
        return [TensorType(x.dtype, (x.shape[0], channels, *[None] * (len(x.shape) - 2)))]
    taken = [operands[0], operands[1], operands[3] if given(operands, 3) else None]
    return [infer("ConvTranspose", taken, _with_pads(attrs, pads))]


def _conv_spec(name: str, last: bool, last_weights: bool) -> OpSpec:
    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        return [_conv(inputs, attrs, last, last_weights)]

    def infer_types(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        return [_infer_conv(operands, attrs, last, last_weights)]

    return heavy(name, reference, infer_types, _conv_flops)


def _conv_transpose_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    x, w = inputs[0], inputs[1]
    assert x is not None and w is not None
    return 2.0 * x.size * (w.size / max(w.dims[0], 1))


def _infer_product(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    a, b = tensor(operands, 0), tensor(operands, 1)
    return [TensorType(a.dtype, matmul_shape(a.shape, b.shape))]


OPS = (
    _conv_spec("FusedConv", last=False, last_weights=False),
    _conv_spec("NhwcConv", last=True, last_weights=True),
    _conv_spec("NhwcFusedConv", last=True, last_weights=False),
    heavy("FusedMatMul", _matmul, _infer_matmul, _matmul_flops, batch_rules.fused_product),
    heavy("FusedMatMulActivation", _matmul, _infer_matmul, _matmul_flops),
    heavy("TransposeMatMul", _matmul, _infer_matmul, _matmul_flops),
    heavy("FusedGemm", _gemm, _infer_gemm, _gemm_flops),
    heavy("GemmFastGelu", _gemm_fast_gelu, _infer_product, product_flops(0, -1)),
    heavy("ConvTransposeWithDynamicPads", _conv_transpose, _infer_conv_transpose, _conv_transpose_flops),
    OpSpec(MS + "NhwcMaxPool", _nhwc_max_pool, _infer_nhwc_max_pool),
)
