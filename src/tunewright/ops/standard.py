"""ONNX's own definitions: any operator of the standard without a faster one of ours runs through onnx.reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..ir.types import DType, MapType, OptionalType, SequenceType, TensorType, Type
from .base import Attrs, Operands, OpSpec

#: results that differ from run to run, or depend on more than the inputs
IMPURE = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"}
)


def split_name(op: str) -> tuple[str, str]:
    """``domain::Name`` -> (domain, Name)."""
    domain, _, name = op.rpartition("::")
    return domain, name


def define(op: str) -> OpSpec | None:
    """The spec of an operator that onnx defines; None when it does not."""
    import onnx.defs

    domain, name = split_name(op)
    if not onnx.defs.has(name, domain):
        return None
    schema = onnx.defs.get_schema(name, domain)

    def reference(arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        return run_reference(op, arrays, attrs, n)

    def infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        return infer_by_schema(op, schema, operands, attrs, n)

    return OpSpec(op, reference, infer, pure=name not in IMPURE)


def make_node(op: str, present: Sequence[bool], attrs: Attrs, n: int) -> Any:
    """A NodeProto with inputs i0.. and outputs o0..; absent inputs have no name."""
    import onnx

    domain, name = split_name(op)
    inputs = [f"i{k}" if here else "" for k, here in enumerate(present)]
    while inputs and not inputs[-1]:
        inputs.pop()
    node = onnx.helper.make_node(name, inputs, [f"o{k}" for k in range(n)], domain=domain)
    for key, value in attrs.items():
        node.attribute.append(make_attribute(key, value))
    return node


def make_attribute(key: str, value: Any) -> Any:
    """An AttributeProto from an attribute of the IR."""
    import onnx

    if isinstance(value, np.ndarray):
        return onnx.helper.make_attribute(key, onnx.numpy_helper.from_array(value))
    if isinstance(value, (TensorType, SequenceType, OptionalType, MapType)):
        return onnx.helper.make_attribute(key, type_to_proto(value))
    if isinstance(value, (list, tuple)) and not value:
        return onnx.helper.make_attribute(key, [], attr_type=onnx.AttributeProto.INTS)
    return onnx.helper.make_attribute(key, value)


def run_reference(op: str, arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """One node through onnx.reference, at the newest version of the operator."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    domain, _ = split_name(op)
    node = make_node(op, [a is not None for a in arrays], attrs, n)
    opsets = [onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version())]
    if domain:
        opsets.append(onnx.helper.make_opsetid(domain, newest_version(domain)))
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [onnx.helper.make_empty_tensor_value_info(name) for name in node.input if name],
        [onnx.helper.make_empty_tensor_value_info(name) for name in node.output],
    )
    model = onnx.helper.make_model(graph, opset_imports=opsets)
    feeds = {f"i{k}": a for k, a in enumerate(arrays) if a is not None}
    return [_tensor(v) for v in ReferenceEvaluator(model).run(None, feeds)]


def newest_version(domain: str) -> int:
    import onnx.defs

    return int(max(s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.domain == domain))


def _tensor(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, np.generic) else value


def infer_by_schema(op: str, schema: Any, operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    """onnx's C++ inference for one node. What it cannot tell is None: the shape is then found out by running."""
    import onnx
    from onnx import shape_inference

    node = make_node(op, [o is not None for o in operands], attrs, n)
    types, data = {}, {}
    for k, operand in enumerate(operands):
        if operand is not None:
            types[f"i{k}"] = type_to_proto(operand.type)
            if operand.value is not None and operand.value.size <= 4096:
                data[f"i{k}"] = onnx.numpy_helper.from_array(operand.value)
    domain, _ = split_name(op)
    opsets = [onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version())]
    if domain:
        opsets.append(onnx.helper.make_opsetid(domain, newest_version(domain)))
    try:
        inferred = shape_inference.infer_node_outputs(schema, node, types, data, opset_imports=opsets)
    except shape_inference.InferenceError as error:
        raise ValueError(str(error).strip()) from None
    return [type_from_proto(inferred[f"o{k}"]) if f"o{k}" in inferred else None for k in range(n)]


def type_to_proto(type: Type) -> Any:
    """TypeProto of a type; unknown dimensions stay empty."""
    import onnx

    if isinstance(type, TensorType):
        return onnx.helper.make_tensor_type_proto(type.dtype.onnx_code, type.shape)
    if isinstance(type, SequenceType):
        return onnx.helper.make_sequence_type_proto(type_to_proto(type.elem) if type.elem else onnx.TypeProto())
    if isinstance(type, OptionalType):
        return onnx.helper.make_optional_type_proto(type_to_proto(type.elem) if type.elem else onnx.TypeProto())
    return onnx.helper.make_map_type_proto(
        type.key.onnx_code, type_to_proto(type.value) if type.value else onnx.TypeProto()
    )


def type_from_proto(proto: Any) -> Type | None:
    """The type a TypeProto says; None when it says nothing. An unknown element type or negative dim raises ValueError."""
    kind = proto.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(proto, kind)
        if tensor.elem_type == 0:
            return None
        try:
            dtype = DType.of_onnx(tensor.elem_type)
        except KeyError:
            raise ValueError(f"element type {tensor.elem_type} is unknown") from None
        if not tensor.HasField("shape"):
            return TensorType(dtype)
        dims: list[int | str | None] = []
        for d in tensor.shape.dim:
            if d.HasField("dim_value"):
                if d.dim_value < 0:
                    raise ValueError(f"dimension {d.dim_value} is negative")
                dims.append(d.dim_value)
            else:
                dims.append(d.dim_param or None)
        return TensorType(dtype, tuple(dims))
    if kind == "sequence_type":
        return SequenceType(type_from_proto(proto.sequence_type.elem_type))
    if kind == "optional_type":
        return OptionalType(type_from_proto(proto.optional_type.elem_type))
    if kind == "map_type":
        return MapType(DType.of_onnx(proto.map_type.key_type), type_from_proto(proto.map_type.value_type))
    return None
