"""Operators that onnx defines. A standard operator without a definition here runs through onnx.reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ..ir.graph import freeze
from ..ir.types import DType, MapType, OptionalType, SequenceType, TensorType, Type
from . import CONTROL
from .base import Attrs, Operands, OpSpec

#: Larger constants are not passed to onnx's inference, which only reads shapes and axes.
_SMALL = 4096


def split_name(op: str) -> tuple[str, str]:
    """``domain::Name`` -> (domain, Name)."""
    domain, _, name = op.rpartition("::")
    return domain, name


def define(op: str) -> OpSpec | None:
    """The spec of an operator that onnx defines, else None."""
    if op not in CONTROL and find_schema(op) is None:  # onnx would create all of its schemas, which take 7 MB
        return None

    def reference(arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        return run_reference(op, arrays, attrs, n)

    def infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        return infer_by_schema(op, operands, attrs, n)

    return OpSpec(op, reference, infer)


@lru_cache(maxsize=1 << 12)  # bounded, because a model may contain any name
def find_schema(op: str) -> Any:
    """The newest definition of an operator; None when onnx does not know it. A deprecation notice is skipped."""
    import onnx.defs

    domain, name = split_name(op)
    if not onnx.defs.has(name, domain):
        return None
    schema = onnx.defs.get_schema(name, domain)
    if schema.deprecated:
        schema = onnx.defs.get_schema(name, schema.since_version - 1, domain)
    return schema


@cache
def opset_imports(op: str) -> Sequence[Any]:
    """The opsets in which the definition of `find_schema` holds."""
    import onnx.defs

    domain, name = split_name(op)
    versions = {"": onnx.defs.onnx_opset_version()}
    schemas = onnx.defs.get_all_schemas_with_history()
    versions[domain] = max(versions.get(domain, 1), *(s.since_version for s in schemas if s.domain == domain))
    newest = onnx.defs.get_schema(name, domain)
    if newest.deprecated:
        versions[domain] = newest.since_version - 1
    return [onnx.helper.make_opsetid(d, v) for d, v in versions.items()]


def make_node(op: str, present: Sequence[bool], attrs: Attrs, n: int) -> Any:
    """A NodeProto with inputs i0.. and outputs o0... Absent inputs have no name, unknown attributes are left out."""
    import onnx

    domain, name = split_name(op)
    inputs = [f"i{k}" if here else "" for k, here in enumerate(present)]
    while inputs and not inputs[-1]:
        inputs.pop()
    node = onnx.helper.make_node(name, inputs, [f"o{k}" for k in range(n)], domain=domain)
    schema = find_schema(op)
    for key, value in attrs.items():
        if schema is None or key in schema.attributes:
            empty = schema.attributes[key].type.value if schema is not None else onnx.AttributeProto.INTS
            node.attribute.append(make_attribute(key, value, empty))
    return node


def make_attribute(key: str, value: Any, empty: int = 7) -> Any:
    """An AttributeProto from an attribute of the IR. ``empty`` is the type of an empty list (default INTS)."""
    import onnx

    if isinstance(value, np.ndarray):
        return onnx.helper.make_attribute(key, onnx.numpy_helper.from_array(value))
    if isinstance(value, (TensorType, SequenceType, OptionalType, MapType)):
        return onnx.helper.make_attribute(key, type_to_proto(value))
    if isinstance(value, (list, tuple)) and not value:
        return onnx.helper.make_attribute(key, [], attr_type=empty)
    if isinstance(value, (list, tuple)) and isinstance(value[0], np.ndarray):
        return onnx.helper.make_attribute(key, [onnx.numpy_helper.from_array(v) for v in value])
    if isinstance(value, (bool, np.bool_, np.integer)):
        value = int(value)
    return onnx.helper.make_attribute(key, value)


@dataclass(frozen=True)
class _Recipe:
    """The specification of an evaluator. Compared by ``key``, which distinguishes attributes by type and by value."""

    op: str
    types: tuple[DType | bool | None, ...]
    n: int
    key: tuple[Any, ...]
    attrs: Attrs = field(compare=False)


@lru_cache(maxsize=256)
def _evaluator(recipe: _Recipe) -> Any:
    """onnx.reference for one node. The evaluator holds no state between runs, so requests share it."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    node = make_node(recipe.op, [t is not False for t in recipe.types], recipe.attrs, recipe.n)
    inputs = [
        # Definitions that are functions of the element types need these types.
        onnx.helper.make_tensor_value_info(f"i{k}", t.onnx_code, None)
        if isinstance(t, DType)
        else onnx.helper.make_empty_tensor_value_info(f"i{k}")
        for k, t in enumerate(recipe.types)
        if t is not False
    ]
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = onnx.helper.make_graph([node], "one", inputs, outputs)
    return ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opset_imports(recipe.op)))


def run_reference(op: str, arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Run one node through onnx.reference, at the newest version of the operator."""
    types = tuple(
        False if a is None else DType.of_numpy(a.dtype) if isinstance(a, np.ndarray) else None for a in arrays
    )
    evaluator = _evaluator(_Recipe(op, types, n, freeze(attrs), attrs))
    return [to_value(v) for v in evaluator.run(None, {f"i{k}": a for k, a in enumerate(arrays) if a is not None})]


def to_value(value: Any) -> Any:
    """Convert a result to the form of the IR: no numpy scalars, strings as objects."""
    if isinstance(value, list):
        return [to_value(v) for v in value]
    if isinstance(value, (np.generic, np.ndarray)):
        array = np.asarray(value)
        return array.astype(object) if array.dtype.kind in "UST" else array
    return value


def infer_by_schema(op: str, operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    """Run onnx's C++ inference for one node. A type that it cannot infer is None; running the node then gives the
    shape."""
    import onnx
    from onnx import shape_inference

    present = [o for o in operands if o is not None]
    if not all(is_complete(o.type) for o in present):
        return [None] * n
    node = make_node(op, [o is not None for o in operands], attrs, n)
    types, data = {}, {}
    for k, operand in enumerate(operands):
        if operand is not None:
            types[f"i{k}"] = type_to_proto(operand.type)
            if operand.value is not None and operand.value.size <= _SMALL:
                data[f"i{k}"] = onnx.numpy_helper.from_array(operand.value)
    try:
        inferred = shape_inference.infer_node_outputs(
            find_schema(op), node, types, data, opset_imports=opset_imports(op)
        )
    except (shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        if not all(isinstance(o.type, TensorType) and o.type.is_static for o in present):
            return [None] * n  # the mismatch may come from unknown dimensions; running the node decides
        raise ValueError(str(error).strip()) from None
    return [_type_or_none(inferred.get(f"o{k}")) for k in range(n)]


def is_complete(type: Type | None) -> bool:
    """Whether all of a type but the shapes is known. onnx's inference accepts only such types."""
    if isinstance(type, (SequenceType, OptionalType)):
        return is_complete(type.elem)
    return isinstance(type, TensorType) or (isinstance(type, MapType) and is_complete(type.value))


def _type_or_none(proto: Any) -> Type | None:
    try:
        return None if proto is None else type_from_proto(proto)
    except ValueError:  # a negative dimension: the run reports the error
        return None


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
    """The type of a TypeProto; None when it is empty. ValueError: unknown element type or negative dimension."""
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
                if d.dim_value < -1:
                    raise ValueError(f"dimension {d.dim_value} is negative")
                dims.append(None if d.dim_value == -1 else d.dim_value)
            else:
                # Exporters write -1, '?' or '*' for any size. Two such dimensions need not be equal.
                dims.append(d.dim_param if any(c.isalpha() for c in d.dim_param) else None)
        return TensorType(dtype, tuple(dims))
    if kind == "sequence_type":
        return SequenceType(type_from_proto(proto.sequence_type.elem_type))
    if kind == "optional_type":
        return OptionalType(type_from_proto(proto.optional_type.elem_type))
    if kind == "map_type":
        return MapType(DType.of_onnx(proto.map_type.key_type), type_from_proto(proto.map_type.value_type))
    return None
