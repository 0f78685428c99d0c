"""Operations whose number of rows depends on the data and is one more result. They exist in the IR alone.

For example, ``tunewright::NonZero`` is ``NonZero`` with that number as last output. Plans use them in place of ONNX's
operations where a launch reads the number to go on (`runtime/control/row_counts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tunewright.ir.types import DType, TensorType, Type

from ..base import Attrs, Operands, OpSpec, Sample
from ..onnx.tensors import detection, indexing

#: the node that holds operations with row counts and all that follows them in a plan
GATHERED = "tunewright::Counted"
#: ONNX's operations, and their counted twins
COUNTED: Mapping[str, str] = {op: f"tunewright::{op}" for op in ("NonZero", "Compress", "NonMaxSuppression", "Unique")}
#: the reverse mapping
PLAIN_OP: Mapping[str, str] = {counted: op for op, counted in COUNTED.items()}


def rows_axis(op: str, attrs: Attrs) -> int:
    """Return the axis of the first result that the count gives the length of (for ONNX's operation or its counted
    twin)."""
    name = PLAIN_OP.get(op, op)
    if name == "NonZero":
        return 1
    return 0 if name == "NonMaxSuppression" else int(attrs.get("axis") or 0)


def _counted(spec: OpSpec) -> OpSpec:
    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        found = list(spec.reference(inputs, attrs, n - 1))[: n - 1]
        return [*found, np.array(found[0].shape[rows_axis(spec.name, attrs)], np.int64)]

    def infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        return [*spec.infer(operands, attrs, n - 1)[: n - 1], TensorType(DType.INT64, ())]

    def samples(rng: np.random.Generator) -> Iterable[Sample]:
        given: Callable[[np.random.Generator], Iterable[Sample]] = spec.samples or (lambda rng: ())
        return [replace(one, outputs=one.outputs + 1) for one in given(rng)]

    return OpSpec(COUNTED[spec.name], reference, infer, samples=samples)


OPS = tuple(_counted(spec) for spec in (*indexing.OPS, *detection.OPS) if spec.name in COUNTED)
