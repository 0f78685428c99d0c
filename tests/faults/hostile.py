"""Models that were made to break an engine: each with what must become of it.

A builder gets the model's folder and a file outside of it that nobody may read, and returns the bytes of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
SECRET = b"secret!!" * 16


@dataclass(frozen=True)
class Case:
    """``says``: what the error must contain, usually the name of the node or tensor; empty: the model must work."""

    name: str
    build: Callable[[Path, Path], bytes]
    says: str
    seconds: float = 1.0


CASES: list[Case] = []


def hostile(says: str, seconds: float = 1.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a builder; it may take the folder and the secret, and may return a ModelProto."""

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        def encoded(folder: Path, secret: Path) -> bytes:
            arguments = (folder, secret)[: build.__code__.co_argcount]
            model = build(*arguments)
            return model if isinstance(model, bytes) else model.SerializeToString()

        CASES.append(Case(build.__name__, encoded, says, seconds))
        return build

    return register


# ---- building blocks -----------------------------------------------------------------------------------------------


def info(name: str, dims: Sequence[Any] | None = (2, 3), dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, dims)


def model_of(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[Any] = (), outputs: Sequence[Any] = ("y",),
    weights: Sequence[onnx.TensorProto] = (), opset: int = 21, **options: Any,
) -> onnx.ModelProto:  # fmt: skip
    """A model; an input or output given by name alone is float32[2,3], or of no type."""
    graph = helper.make_graph(
        nodes, "hostile", [info(i) if isinstance(i, str) else i for i in inputs],
        [helper.make_empty_tensor_value_info(o) if isinstance(o, str) else o for o in outputs], list(weights),
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, **options)


def weight(name: str, array: Any, dtype: Any = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(array, dtype), name)


def one(
    op: str, inputs: Sequence[Any] = ("x",), weights: Sequence[onnx.TensorProto] = (), n: int = 1, **attrs: Any
) -> Any:
    """A model with a single node called ``bad``."""
    opset = attrs.pop("opset", 21)
    names = [w.name for w in weights]
    formal = [
        i for k, i in enumerate(inputs) if i not in inputs[:k] and (not isinstance(i, str) or (i and i not in names))
    ]
    called = [i if isinstance(i, str) else i.name for i in inputs]
    outputs = [f"y{k}" for k in range(n)]
    return model_of([helper.make_node(op, called, outputs, name="bad", **attrs)], formal, outputs, weights, opset)


def external(location: str, **entries: str) -> onnx.ModelProto:
    """x + w, where w lies in another file."""
    w = TensorProto(name="w", data_type=FLOAT, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        w.external_data.add(key=key, value=value)
    return model_of([helper.make_node("Add", ["x", "w"], ["y"], name="add")], ["x"], weights=[w])


def body(nodes: Sequence[onnx.NodeProto], inputs: Sequence[Any], outputs: Sequence[str]) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", list(inputs), [helper.make_empty_tensor_value_info(o) for o in outputs])
