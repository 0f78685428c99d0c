"""Every operator of ours against ONNX Runtime or onnx.reference on its samples, and its inference against itself."""

from __future__ import annotations

import pytest

from helpers.op_oracle import oracle
from tunewright.ops import lookup, names
from tunewright.ops.onnx import (
    activation,
    attention,
    cast,
    conv,
    deform,
    elementwise,
    matmul,
    norm,
    pool,
    recurrent,
    reduction,
)
from tunewright.ops.onnx.tensors import (
    detection,
    generate,
    indexing,
    qlinear,
    quantize,
    resize,
    sampling,
    shaping,
    slicing,
)
from tunewright.testing.opcheck import assert_op

DENSE = (attention, conv, deform, matmul, norm, pool, qlinear, quantize, recurrent, reduction, resize, sampling)
LIGHT = (activation, cast, detection, elementwise, generate, indexing, shaping, slicing)

#: gone from the standard since opset 11: no oracle knows it, and it shares the code of ScatterElements
RETIRED = {"Scatter"}

SAMPLED = [name for name in names() if "::" not in name and (spec := lookup(name)) is not None and spec.samples]


@pytest.mark.parametrize("family", [*DENSE, *LIGHT], ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_every_op_of_a_family_has_samples(family: object) -> None:
    assert {spec.name for spec in family.OPS if spec.samples is None} <= RETIRED  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SAMPLED)
def test_op(name: str) -> None:
    spec = lookup(name)
    assert spec is not None
    assert_op(spec, oracle=oracle)
