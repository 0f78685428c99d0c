"""An operator of the IR: a convolution followed by a depthwise convolution.

Inputs: the data, weights and bias of the first convolution, then weights and bias of the depthwise one. Biases may be
absent. The operands of the element-wise steps in between follow. Attributes: those of the depthwise convolution, those
of the first one with the prefix ``first_``, and ``middle``, the steps in between as `text` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.graph import Fused
from tunewright.ir.types import TensorType, Type

from .. import lookup
from ..base import Array, Attrs, Operand, Operands, OpSpec, Sample
from ..samples.base import Rng, normal
from ..shapes import optional

PAIR = "tunewright::ConvPair"
#: number of inputs in front of the operands of the middle steps
MAIN = 5
_FIRST = "first_"


def text(steps: Sequence[Fused]) -> str:
    """Encode steps for the attribute. Argument i >= 0 is input i of the pair, ~i is result i, ~0 the first
    convolution's."""
    data = [[s.op, s.args, dict(s.attrs)] for s in steps]
    return json.dumps(data, separators=(",", ":"), sort_keys=True)


def middle(attrs: Attrs) -> tuple[Fused, ...]:
    """Decode the steps from the attribute. ValueError when the attribute is malformed."""
    try:
        return tuple(Fused(str(op), tuple(map(int, args)), more) for op, args, more in json.loads(attrs["middle"]))
    except (TypeError, KeyError) as error:
        raise ValueError(f"middle says no steps: {error!r}") from None


def joined(first: Attrs, second: Attrs, steps: Sequence[Fused]) -> dict[str, Any]:
    """The attributes of a pair, from those of its two convolutions and the steps between them."""
    return {**second, **{_FIRST + k: v for k, v in first.items()}, "middle": text(steps)}


def apart(attrs: Attrs) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes of the first and of the depthwise convolution."""
    first = {k.removeprefix(_FIRST): v for k, v in attrs.items() if k.startswith(_FIRST)}
    return first, {k: v for k, v in attrs.items() if k != "middle" and not k.startswith(_FIRST)}


def _conv() -> OpSpec:
    spec = lookup("Conv")
    assert spec is not None
    return spec


def _reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    first, second = apart(attrs)
    results = [np.asarray(_conv().reference([inputs[0], inputs[1], optional(inputs, 2)], first, 1)[0])]
    for step in middle(attrs):
        spec = lookup(step.op)
        if spec is None or not spec.elementwise:
            raise ValueError(f"{step.op} is not element-wise")
        args = [inputs[i] if i >= 0 else results[~i] for i in step.args]
        results.append(np.asarray(spec.reference(args, step.attrs, 1)[0]))
    return [np.asarray(_conv().reference([results[-1], inputs[3], optional(inputs, 4)], second, 1)[0])]


def between(operands: Operands, attrs: Attrs) -> Type | None:
    """The type of the first convolution's result. The middle steps do not change it."""
    return _conv().infer([*operands[:2], optional(operands, 2)], apart(attrs)[0], 1)[0]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    made = between(operands, attrs)
    if made is None:
        return [None]
    return _conv().infer([Operand(made), operands[3], optional(operands, 4)], apart(attrs)[1], 1)


def _flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    made = between([None if t is None else Operand(t) for t in inputs], attrs)
    spec, (first, second) = _conv(), apart(attrs)
    assert isinstance(made, TensorType)
    return spec.work(inputs[:2], [made], first).flops + spec.work([made, inputs[3]], outputs, second).flops


def _samples(rng: Rng) -> list[Sample]:
    first, second = {"kernel_shape": (1, 1)}, {"group": 6, "kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}
    given = [normal(rng, 2, 4, 5, 7), normal(rng, 6, 4, 1, 1), normal(rng, 6), normal(rng, 6, 1, 3, 3), normal(rng, 6)]
    low, high = np.array(0, np.float32), np.array(6, np.float32)
    bare = [given[0], normal(rng, 6, 4, 3, 3), None, given[3]]
    stem = {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
    silu = [Fused("Sigmoid", (~0,)), Fused("Mul", (~0, ~1))]
    return [
        Sample([*given, low, high], joined(first, {**second, "strides": (2, 2)}, [Fused("Clip", (~0, 5, 6))])),
        Sample(bare, joined(stem, second, silu)),
    ]


OPS = (OpSpec(PAIR, _reference, _infer, flops=_flops, samples=_samples, heavy=True),)
