"""Independent answers to one operator: ONNX Runtime where it has a kernel, else onnx.reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from tunewright.ops.base import OpSpec, Sample
from tunewright.ops.standard import make_node

try:
    import onnxruntime as ort
except ImportError:  # the peers extra is not installed: onnx.reference alone
    ort = None

#: an opset that every ONNX Runtime of the peers extra reads
OPSET = 21
#: ONNX Runtime computes these in single precision even for float64
SINGLE = frozenset({"Erf", "Gelu", "Shrink"})
#: and onnx.reference these: their definitions
DOUBLE = {
    "Erf": np.vectorize(math.erf),
    "Gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
#: how it says that it has no such kernel
REFUSALS = ("NOT_IMPLEMENTED", "INVALID_GRAPH", "not implemented", "No corresponding Numpy type", "FAIL")


def model_of(op: str, sample: Sample, opset: int) -> onnx.ModelProto:
    node = make_node(op, [x is not None for x in sample.inputs], sample.attrs, sample.outputs)
    inputs = [
        helper.make_tensor_value_info(f"i{k}", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for k, x in enumerate(sample.inputs)
        if x is not None
    ]
    outputs = [helper.make_empty_tensor_value_info(f"o{k}") for k in range(sample.outputs)]
    graph = helper.make_graph([node], "one", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def feeds_of(sample: Sample) -> dict[str, Any]:
    return {f"i{k}": x for k, x in enumerate(sample.inputs) if x is not None}


@cache
def first_version(op: str) -> int:
    return min(s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.name == op and not s.domain)


def run_ort(op: str, sample: Sample) -> Sequence[Any] | None:
    """ONNX Runtime's outputs; None where it has no kernel for these types, or a less precise one."""
    kinds = {x.dtype for x in sample.inputs if x is not None}
    if ort is None or any(k.kind == "V" for k in kinds) or (op in SINGLE and np.dtype(np.float64) in kinds):
        return None
    if op == "Cast" and sample.attrs["to"] >= 16:
        return None  # numpy has no such types, so its binding hands out bytes
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    model = model_of(op, sample, max(OPSET, first_version(op))).SerializeToString()
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return session.run(None, feeds_of(sample))
    except Exception as error:  # the classes that it raises have no common public base
        if any(word in str(error) for word in REFUSALS):
            return None
        raise


def run_onnx(op: str, sample: Sample) -> Sequence[Any]:
    """onnx.reference's outputs at the newest opset."""
    model = model_of(op, sample, onnx.defs.onnx_opset_version())
    with np.errstate(all="ignore"):
        return ReferenceEvaluator(model).run(None, feeds_of(sample))


def oracle(spec: OpSpec, sample: Sample) -> Sequence[Any]:
    if spec.name in DOUBLE and sample.inputs[0].dtype == np.float64:
        return [DOUBLE[spec.name](sample.inputs[0])]
    found = run_ort(spec.name, sample)
    return run_onnx(spec.name, sample) if found is None else found
