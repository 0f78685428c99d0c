"""Squeeze and excite as one operator of the IR: channels times factors that depend on the channels' averages.

Inputs: the data (N, C, ...), weights (H, C, 1, ...) and bias (H) of a pointwise convolution, weights (C, H, 1, ...) and
bias (C) of another. Biases may be absent. The result is ``data * outer(second(inner(first(average of data))))``.
Attributes: ``inner`` and ``outer`` name the activations; ``inner_alpha``, ``outer_beta``, ... are their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import TensorType, Type

from .. import lookup
from ..base import Array, Attrs, Operands, OpSpec, Sample
from ..numeric import narrow, wide
from ..samples.base import Rng, normal
from ..shapes import optional, tensor

EXCITE = "tunewright::SqueezeExcite"
SIDES = ("inner", "outer")


def activation(attrs: Attrs, side: str) -> tuple[str, Mapping[str, Any]]:
    """The operator of one of `SIDES`, and its attributes."""
    return str(attrs[side]), {k.removeprefix(f"{side}_"): v for k, v in attrs.items() if k.startswith(f"{side}_")}


def _activate(x: Array, attrs: Attrs, side: str) -> Array:
    op, more = activation(attrs, side)
    spec = lookup(op)
    if spec is None or not spec.elementwise:
        raise ValueError(f"{side} {op!r} is no activation")
    return np.asarray(spec.reference([x], more, 1)[0])


def _product(x: Array, weights: Array, bias: Array | None) -> Array:
    made = x @ wide(weights).reshape(weights.shape[:2]).T
    return np.asarray(made if bias is None else made + wide(bias))


def _reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    data, first, second = inputs[0], inputs[1], inputs[3]
    x = wide(data)
    hidden = _activate(_product(x.mean(tuple(range(2, x.ndim))), first, optional(inputs, 2)), attrs, "inner")
    factors = _activate(_product(hidden, second, optional(inputs, 4)), attrs, "outer")
    return [narrow(x * factors.reshape(*factors.shape, *(1,) * (x.ndim - 2)), data.dtype)]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, first, second = (tensor(operands, i) for i in (0, 1, 3))
    if x.shape is not None and first.shape is not None and second.shape is not None:
        hidden, channels = first.shape[:2]
        if len(x.shape) < 3 or x.shape[1] != channels or tuple(second.shape[:2]) != (channels, hidden):
            raise ValueError(f"weights {first} and {second} do not fit {x}")
    return [TensorType(x.dtype, x.shape)]


def _flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    x, first, second = inputs[0], inputs[1], inputs[3]
    assert x is not None and first is not None and second is not None
    return 2.0 * x.size + 2.0 * x.dims[0] * (first.size + second.size)


def _samples(rng: Rng) -> list[Sample]:
    attrs = {"inner": "Swish", "inner_alpha": 1.0, "outer": "Sigmoid"}
    given = [normal(rng, 2, 6, 3, 4), normal(rng, 3, 6, 1, 1), normal(rng, 3), normal(rng, 6, 3, 1, 1), normal(rng, 6)]
    bare = [given[0], given[1], None, given[3]]
    return [Sample(given, attrs), Sample(bare, {"inner": "Relu", "outer": "HardSigmoid", "outer_alpha": 1 / 6})]


OPS = (OpSpec(EXCITE, _reference, _infer, flops=_flops, samples=_samples, heavy=True),)
