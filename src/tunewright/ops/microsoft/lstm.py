"""DynamicQuantizeLSTM with 8-bit weights. Inputs are quantised once and hidden states at each step, over their own
range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..input_errors import check_lengths
from ..numeric import integer_matmul, sigmoid
from ..shapes import optional, tensor
from .common import MS, activate, dims, dynamic_quantize

#: defaults of (alpha, beta) for the activations that use them
DEFAULTS = {
    "LeakyRelu": (0.01,),
    "HardSigmoid": (0.2, 0.5),
    "Elu": (1.0,),
    "ThresholdedRelu": (1.0,),
    "ScaledTanh": (1.0, 1.0),
    "Affine": (1.0, 0.0),
}


def _activations(attrs: Attrs, directions: int) -> list[list[Callable[[Array], Array]]]:
    """(f, g, h) for each direction. Alphas and betas are given in order, only for activations that take them."""
    known = {name.lower(): name for name in (*DEFAULTS, "Sigmoid", "Tanh", "Relu", "Softsign", "Softplus")}
    names = [known.get(str(n).lower(), str(n)) for n in attrs.get("activations", ())]
    names = names or ["Sigmoid", "Tanh", "Tanh"] * directions
    if len(names) != 3 * directions:
        raise ValueError(f"{len(names)} activations for {directions} direction(s)")
    alphas, betas = list(attrs.get("activation_alpha", ())), list(attrs.get("activation_beta", ()))
    functions: list[Callable[[Array], Array]] = []
    for name in names:
        default = DEFAULTS.get(name, ())
        values = [pool.pop(0) if pool else d for pool, d in zip((alphas, betas), default, strict=False)]
        functions.append(_activation(name, values))
    return [functions[3 * d : 3 * d + 3] for d in range(directions)]


def _activation(name: str, values: Sequence[float]) -> Callable[[Array], Array]:
    if name == "Sigmoid":
        return sigmoid
    if name in ("Affine", "ScaledTanh"):
        alpha, beta = (np.float32(v) for v in values)
        return (lambda x: alpha * x + beta) if name == "Affine" else (lambda x: np.asarray(alpha * np.tanh(beta * x)))
    return lambda x: activate(name, x, values)


def _product(x: Array, w: Array, scale: Array, zero: Array) -> Array:
    """The product of x, quantised over its range, and 8-bit weights."""
    quantised, x_scale, x_zero = dynamic_quantize(x)
    sums = integer_matmul(quantised.astype(np.int32) - int(x_zero), w.astype(np.int32) - zero.astype(np.int32))
    return np.asarray(sums.astype(np.float32) * (x_scale * scale), np.float32)


def _reverse(x: Array, lengths: Array) -> Array:
    """Reverse each sequence of (S, B, ...) within its length. Padding stays in place."""
    y = x.copy()
    for b, count in enumerate(lengths):
        y[:count, b] = x[:count, b][::-1]
    return y


def _one_direction(
    x: Array,
    lengths: Array,
    weights: Sequence[Array],
    recurrent: Sequence[Array],
    bias: Array | None,
    h: Array,
    c: Array,
    peepholes: Array | None,
    functions: Sequence[Callable[[Array], Array]],
    attrs: Attrs,
) -> tuple[Array, Array, Array]:
    """Run one direction: (all hidden states, the last hidden state, the last cell state)."""
    size = h.shape[-1]
    f, g, out = functions
    steps = int(lengths.max(initial=0))
    limit = np.float32(attrs.get("clip", 0.0) or np.finfo(np.float32).max)
    pi, po, pf = np.zeros((3, size), np.float32) if peepholes is None else peepholes.reshape(3, size)
    fixed = np.zeros(4 * size, np.float32) if bias is None else bias[: 4 * size] + bias[4 * size :]
    gates = _product(x[:steps].reshape(-1, x.shape[-1]), *weights).reshape(steps, x.shape[1], 4 * size)
    every = np.zeros((*x.shape[:2], size), np.float32)
    last_h, last_c = np.zeros_like(h), np.zeros_like(c)

    def clipped(v: Array) -> Array:
        return np.clip(v, -limit, limit)

    for t in range(steps):
        i, o, r, n = np.split(gates[t] + _product(h, *recurrent), 4, axis=-1)
        bi, bo, bf, bc = np.split(fixed, 4)
        i = f(clipped(i + pi * c + bi))
        forget = np.float32(1) - i if attrs.get("input_forget", 0) else f(clipped(r + pf * c + bf))
        c = forget * c + i * g(clipped(n + bc))
        live = np.less(t, lengths)[:, None]
        h = np.where(live, f(clipped(o + po * c + bo)) * out(c), np.float32(0))
        every[t] = h
        done = np.equal(t + 1, lengths)[:, None]
        last_h, last_c = np.where(done, h, last_h), np.where(done, c, last_c)
    return every, last_h, last_c


def _lstm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, w, r = inputs[:3]
    bias, lengths, h0, c0, peepholes = (optional(inputs, i) for i in range(3, 8))
    w_scale, w_zero, r_scale, r_zero = inputs[8:12]
    length, batch, _ = x.shape
    directions, size = r.shape[:2]
    if lengths is not None:
        check_lengths(lengths, length)
    lengths = np.full(batch, length) if lengths is None else lengths.astype(np.int64)
    functions = _activations(attrs, directions)
    results = []
    for d in range(directions):
        backward = d == 1 or attrs.get("direction", "forward") == "reverse"
        every, h, c = _one_direction(
            _reverse(x, lengths) if backward else x,
            lengths,
            (w[d], w_scale[d], w_zero[d]),
            (r[d], r_scale[d], r_zero[d]),
            None if bias is None else bias[d],
            np.zeros((batch, size), np.float32) if h0 is None else h0[d],
            np.zeros((batch, size), np.float32) if c0 is None else c0[d],
            None if peepholes is None else peepholes[d],
            functions[d],
            attrs,
        )
        results.append((_reverse(every, lengths) if backward else every, h, c))
    return [np.stack([r[0] for r in results], 1), np.stack([r[1] for r in results]), np.stack([r[2] for r in results])]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    dtype = tensor(operands, 0).dtype
    length, batch, _ = dims(operands, 0, 3)
    directions, size, _ = dims(operands, 2, 3)
    wanted = 2 if attrs.get("direction", "forward") == "bidirectional" else 1
    if isinstance(directions, WHOLE) and directions != wanted:
        raise ValueError(f"R has {directions} direction(s) instead of {wanted}")
    last = TensorType(dtype, (directions, batch, size))
    return [TensorType(dtype, (length, directions, batch, size)), last, last]


def _flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    x, w, r = inputs[:3]
    assert x is not None and w is not None and r is not None
    return 2.0 * x.dims[0] * x.dims[1] * (w.size + r.size)


OPS = (OpSpec(MS + "DynamicQuantizeLSTM", _lstm, _infer, flops=_flops, heavy=True, steep=True),)
