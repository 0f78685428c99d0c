"""Prepares NodeProtos for conversion: binds attributes of function calls, restores the order, reads constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..errors import ModelError
from .guard import kind_of
from .protobuf_messages import onnx

Attributes: TypeAlias = Mapping[str, onnx.AttributeProto]


def resolve(node: onnx.NodeProto, bound: Attributes, where: str) -> dict[str, onnx.AttributeProto]:
    """Return a node's attributes by name.

    Inside a function an attribute may refer to one of the call; it is absent if the call does not give that one.
    Referenced attributes are not copied, because they may be large and shared by many nodes.
    """
    found: dict[str, onnx.AttributeProto] = {}
    for a in node.attribute:
        if a.name in found:
            raise ModelError(f"attribute {a.name!r} is given twice", where=where)
        target = bound.get(a.ref_attr_name) if a.ref_attr_name else a
        if target is not None:
            found[a.name] = target
    return found


def without(node: onnx.NodeProto, names: Sequence[str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for i, name in enumerate(copy.input):
        if name in names:
            copy.input[i] = ""
    return copy


def ordered(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Return the nodes in topological order, which not all files keep. Raises on cycles and on values made twice."""
    made: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for name in node.output:
            if name and name in made:
                raise ModelError(f"makes {name!r}, which exists already", where=f"node {node.name!r} ({node.op_type})")
            if name:
                made[name] = i
    needs: list[list[int]] = [[made[name] for name in _reads(node) if name in made] for node in nodes]
    if all(k < i for i, ks in enumerate(needs) for k in ks):
        return list(nodes)
    order: list[onnx.NodeProto] = []
    state = [0] * len(nodes)  # 1: on the stack, 2: placed
    for root in range(len(nodes)):
        stack = [(root, iter(needs[root]))] if not state[root] else []
        while stack:
            i, waiting = stack[-1]
            state[i] = 1
            for k in waiting:
                if state[k] == 1:
                    where = f"node {nodes[k].name!r} ({nodes[k].op_type})"
                    raise ModelError("depends on its own output (a cycle)", where=where)
                if not state[k]:
                    stack.append((k, iter(needs[k])))
                    break
            else:
                state[i] = 2
                order.append(nodes[i])
                stack.pop()
    return order


def _reads(node: onnx.NodeProto) -> list[str]:
    """Return the names that a node or its bodies read."""
    names = [name for name in node.input if name]
    for a in node.attribute:
        if kind_of(a) == onnx.AttributeProto.GRAPH:
            local = {i.name for i in a.g.input} | {t.name for t in a.g.initializer}
            local |= {o for n in a.g.node for o in n.output}
            names += [n for inner in a.g.node for n in _reads(inner) if n not in local]
            names += [o.name for o in a.g.output if o.name not in local]
    return names


def constant_array(attrs: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return the value of a Constant node."""
    for key, dtype in (
        ("value_float", np.float32),
        ("value_floats", np.float32),
        ("value_int", np.int64),
        ("value_ints", np.int64),
    ):
        if key in attrs:
            return np.asarray(attrs[key], dtype)
    for key in ("value_string", "value_strings"):
        if key in attrs:
            return np.asarray(attrs[key], object)
    value = attrs["value"] if "value" in attrs else attrs["sparse_value"]
    if not isinstance(value, np.ndarray):
        raise ValueError("value is not a tensor")
    return value
