"""Simple OpenVINO layers: activations, ScaleShift, PReLU, Power, Eltwise, FullyConnected."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import wide
from ..shapes import broadcast, elementwise, given, same_as, tensor
from .common import choice, flag, floats, name, required


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def _softplus(x: Array) -> Array:
    return np.logaddexp(x, np.zeros((), x.dtype))


def _elu(x: Array, attrs: Attrs) -> Array:
    return np.where(x > 0, x, x.dtype.type(attrs.get("alpha", 1.0)) * np.expm1(np.minimum(x, 0)))


def _relu(x: Array, attrs: Attrs) -> Array:
    return np.where(x > 0, x, x * x.dtype.type(attrs.get("negative_slope", 0.0)))


def _clamp(x: Array, attrs: Attrs) -> Array:
    low, high = float(required(attrs, "min")), float(required(attrs, "max"))
    if x.dtype.kind in "iu":
        low, high = math.ceil(low), math.floor(high)
    return np.clip(x, low, high).astype(x.dtype, copy=False)


def _power(x: Array, attrs: Attrs) -> Array:
    power, scale, shift = (x.dtype.type(attrs.get(k, d)) for k, d in (("power", 1.0), ("scale", 1.0), ("shift", 0.0)))
    base = x * scale + shift
    return np.asarray(base if power == 1 else np.power(base, power))


#: name -> function of x and the attributes; one element makes one element
_UNARY: dict[str, Callable[[Array, Attrs], Array]] = {
    "Clamp": _clamp,
    "ELU": _elu,
    "HSigmoid": lambda x, attrs: np.clip(x + 3, 0, 6) / 6,
    "HSwish": lambda x, attrs: x * np.clip(x + 3, 0, 6) / 6,
    "Mish": lambda x, attrs: x * np.tanh(_softplus(x)),
    "Power": _power,
    "ReLU": _relu,
    "ReLU6": lambda x, attrs: np.clip(x, 0, x.dtype.type(attrs.get("n", 6.0))),
    "Sigmoid": lambda x, attrs: _sigmoid(x),
    "SoftPlus": lambda x, attrs: _softplus(x),
    "TanH": lambda x, attrs: np.tanh(x),
}
_UNARY["Elu"], _UNARY["Tanh"] = _UNARY["ELU"], _UNARY["TanH"]  # operation sets and older files use different spellings
#: names of the functions in an Activation layer
_TYPES = {
    "clamp": "Clamp",
    "elu": "ELU",
    "hsigmoid": "HSigmoid",
    "hswish": "HSwish",
    "mish": "Mish",
    "relu": "ReLU",
    "relu6": "ReLU6",
    "sigmoid": "Sigmoid",
    "softplus": "SoftPlus",
    "tanh": "TanH",
}


def _unary(function: Callable[[Array, Attrs], Array]) -> Callable[[Sequence[Any], Attrs, int], list[Array]]:
    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
        return [np.asarray(function(wide(inputs[0]), attrs), inputs[0].dtype)]

    return reference


def _by_type(x: Array, attrs: Attrs) -> Array:
    return _UNARY[_TYPES[_type(attrs)]](x, attrs)


def _type(attrs: Attrs) -> str:
    return choice({"type": str(required(attrs, "type")).lower()}, "type", "", tuple(_TYPES))


def _infer_activation(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    if _type(attrs) == "clamp":
        return _infer_clamp(operands, attrs, n)
    return [tensor(operands, 0)]


def _infer_clamp(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    low, high = float(required(attrs, "min")), float(required(attrs, "max"))
    if low > high:
        raise ValueError(f"attribute 'min' is {low}, above 'max', {high}")
    return [tensor(operands, 0)]


def swish(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x = wide(inputs[0])
    beta = wide(inputs[1]).reshape(()) if len(inputs) > 1 and inputs[1] is not None else x.dtype.type(1)
    return [np.asarray(x * _sigmoid(beta * x), inputs[0].dtype)]


def hard_sigmoid(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    """HardSigmoid. Slope and shift are scalar inputs, as in the operation set, or attributes."""
    x = wide(inputs[0])
    alpha, beta = (
        wide(inputs[i]).reshape(())
        if len(inputs) > i and inputs[i] is not None
        else x.dtype.type(attrs.get(key, default))
        for i, key, default in ((1, "alpha", 0.2), (2, "beta", 0.5))
    )
    return [np.asarray(np.clip(alpha * x + beta, 0, 1), inputs[0].dtype)]


def _infer_scalars(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    """Infer the type of operators with data and scalars. The scalars may have any rank, as OpenVINO's front end
    squeezes them."""
    for i in range(1, len(operands)):
        if given(operands, i):
            t = tensor(operands, i)
            if t.is_static and t.size != 1:
                raise ValueError(f"input {i} is {t} instead of a scalar")
    return [tensor(operands, 0)]


def _channels(parameter: Array, x: Array) -> Array:
    """Reshape a parameter per channel to fit data [n, c, ...]. A parameter of the data's rank stays unchanged."""
    if parameter.size == 1:
        return parameter.reshape(())
    return parameter if parameter.ndim >= x.ndim else parameter.reshape(-1, *(1,) * (x.ndim - 2))


def scale_shift(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x = wide(inputs[0])
    result = x
    if len(inputs) > 1 and inputs[1] is not None:
        result = result * _channels(wide(inputs[1]), x)
    if len(inputs) > 2 and inputs[2] is not None:
        result = result + _channels(wide(inputs[2]), x)
    return [np.array(result, inputs[0].dtype)]


def prelu(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x = wide(inputs[0])
    return [np.where(x > 0, x, x * _channels(wide(inputs[1]), x)).astype(inputs[0].dtype, copy=False)]


def _infer_per_channel(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data = tensor(operands, 0)
    for i in range(1, len(operands)):
        if not given(operands, i) or data.shape is None:
            continue
        t = tensor(operands, i)
        if t.is_static and t.size != 1 and len(t.dims) < len(data.shape):
            channels = data.shape[1]
            if isinstance(channels, WHOLE) and t.size != channels:
                raise ValueError(f"input {i} has {t.size} values for {channels} channels")
        elif t.is_static and t.size != 1 and broadcast(data.shape, t.shape) != data.shape and data.is_static:
            raise ValueError(f"input {i}, {t}, does not fit into the data, {data}")
    return [data]


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "add": np.add,
    "mul": np.multiply,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "sub": np.subtract,
    "div": np.divide,
    "pow": np.power,
    "squared_diff": lambda a, b: (a - b) * (a - b),
}


def eltwise(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    operation, values = _operation(attrs), [wide(v) for v in inputs]
    if "coeff" in attrs and operation in ("sum", "add"):
        values = [v * v.dtype.type(c) for v, c in zip(values, floats(attrs, "coeff"), strict=True)]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        result = reduce(_BINARY[operation], values)
    return [np.array(result, inputs[0].dtype)]


def _operation(attrs: Attrs) -> str:
    return choice({"operation": str(attrs.get("operation", "sum")).lower()}, "operation", "sum", tuple(_BINARY))


def _infer_eltwise(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    if _operation(attrs) in ("sum", "add") and "coeff" in attrs and len(floats(attrs, "coeff")) != len(operands):
        raise ValueError(f"{len(floats(attrs, 'coeff'))} values in 'coeff' for {len(operands)} inputs")
    return elementwise()(operands, attrs, n)


def fully_connected(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x, weights = wide(inputs[0]), wide(inputs[1])
    x = x.reshape(x.shape[0], -1)
    weights = weights.reshape(-1, x.shape[1]).T if not flag(attrs, "transpose") else weights.reshape(x.shape[1], -1)
    result = x @ weights
    if len(inputs) > 2 and inputs[2] is not None:
        result = result + wide(inputs[2]).reshape(-1)
    return [result.astype(inputs[0].dtype, copy=False)]


def _infer_fully_connected(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data, weights = tensor(operands, 0), tensor(operands, 1)
    inner: Dim = None
    outputs: Dim = None
    if data.shape is not None and all(isinstance(d, WHOLE) for d in data.shape[1:]):
        inner = math.prod(d for d in data.shape[1:] if isinstance(d, WHOLE))
    if weights.is_static and isinstance(inner, WHOLE) and inner:
        outputs = weights.size // inner
        if outputs * inner != weights.size:
            raise ValueError(f"{weights.size} weights (input 1) are no multiple of the {inner} inputs")
    declared = next((attrs[k] for k in ("out_size", "out-size", "num_output") if k in attrs), None)
    if declared is not None and outputs is not None and int(declared) != outputs:
        raise ValueError(f"{declared} outputs are declared, but the weights (input 1) make {outputs}")
    return [TensorType(data.dtype, None if data.shape is None else (data.shape[0], outputs))]


def _fully_connected_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    data = inputs[0]
    return 2.0 * outputs[0].size * (data.size / max(data.dims[0], 1) if data is not None else 1.0)


_SAME = same_as()
OPS = (
    *(
        OpSpec(name(op), _unary(function), _infer_clamp if op == "Clamp" else _SAME, elementwise=True)
        for op, function in _UNARY.items()
    ),
    OpSpec(name("Activation"), _unary(_by_type), _infer_activation, elementwise=True),
    OpSpec(name("Swish"), swish, _infer_scalars, elementwise=True),
    OpSpec(name("HardSigmoid"), hard_sigmoid, _infer_scalars, elementwise=True),
    OpSpec(name("ScaleShift"), scale_shift, _infer_per_channel, flops=lambda i, o, a: 2.0 * o[0].size),
    OpSpec(name("PReLU"), prelu, _infer_per_channel),
    OpSpec(name("Eltwise"), eltwise, _infer_eltwise, elementwise=True),
    OpSpec(name("FullyConnected"), fully_connected, _infer_fully_connected, flops=_fully_connected_flops),
    OpSpec(name("InnerProduct"), fully_connected, _infer_fully_connected, flops=_fully_connected_flops),
)
