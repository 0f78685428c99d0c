"""Operations that make as many rows as the data says, with the number of rows as one more result: of the IR alone.

``tunewright::NonZero`` is ``NonZero`` whose last output is that number, and so on. Plans have them in place of ONNX's
where a launch reads the number to go on (`runtime/control/row_counts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tunewright.ir.types import DType, TensorType, Type

from ..base import Attrs, Operands, OpSpec, Sample
from ..onnx.tensors import detection, indexing

#: the node that operations with row counts become in a plan, together with all that follows
GATHERED = "tunewright::Counted"
#: ONNX's operations, and the same with a count
COUNTED: Mapping[str, str] = {op: f"tunewright::{op}" for op in ("NonZero", "Compress", "NonMaxSuppression", "Unique")}
#: the other way round
PLAIN_OP: Mapping[str, str] = {counted: op for op, counted in COUNTED.items()}


def rows_axis(op: str, attrs: Attrs) -> int:
    """The axis of the first result that is as long as the count (of ONNX's operation or its counted twin)."""
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
