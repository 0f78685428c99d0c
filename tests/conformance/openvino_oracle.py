"""OpenVINO as an oracle for its own layers: its ONNX front end where that knows the operator, else its operation sets.

Importing this module skips the tests where OpenVINO is not installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tunewright import Core
from tunewright.ir.types import TensorType
from tunewright.ops import lookup
from tunewright.ops.base import Operand

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what openvino warns of at its import is not ours
    ov = pytest.importorskip("openvino")
    ops = pytest.importorskip("openvino.opset15")
    factories = pytest.importorskip("openvino.utils.node_factory")

DOMAIN = "org.openvinotoolkit"


def rng_of(*key: object) -> np.random.Generator:
    return np.random.default_rng([sum(ord(c) * (i + 1) for i, c in enumerate(str(k))) for k in key])


def f32(rng: np.random.Generator, *shape: int, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    return rng.uniform(low, high, shape).astype(np.float32)


def one_node(
    op: str,
    inputs: Sequence[np.ndarray | None],
    attrs: Mapping[str, Any],
    n: int = 1,
    constant: Sequence[int] = (),
    domain: str = DOMAIN,
) -> onnx.ModelProto:
    """A model of one node; the inputs named in ``constant`` are initializers."""
    names = ["" if v is None else f"i{k}" for k, v in enumerate(inputs)]
    node = helper.make_node(op, names, [f"o{k}" for k in range(n)], domain=domain, name="node", **attrs)
    free = [
        helper.make_tensor_value_info(f"i{k}", helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for k, v in enumerate(inputs)
        if v is not None and k not in constant
    ]
    weights = [numpy_helper.from_array(v, f"i{k}") for k, v in enumerate(inputs) if v is not None and k in constant]
    outputs = [onnx.ValueInfoProto(name=f"o{k}") for k in range(n)]
    graph = helper.make_graph([node], "one", free, outputs, weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def feeds_of(inputs: Sequence[np.ndarray | None], constant: Sequence[int] = ()) -> dict[str, np.ndarray]:
    return {f"i{k}": v for k, v in enumerate(inputs) if v is not None and k not in constant}


def ours(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Our results for a model of one node; what inference says of open shapes must hold for them too."""
    results = list(Core().compile_model(model)(dict(feeds)).values())
    node = model.graph.node[0]
    spec = lookup(f"{node.domain}::{node.op_type}")
    assert spec is not None
    attrs = {a.name: plain(helper.get_attribute_value(a)) for a in node.attribute}
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    arrays = {**feeds, **weights}
    for openness in ("names", "unknown dims", "unknown ranks"):
        sizes: dict[str, int] = {}
        operands: list[Operand | None] = []
        for name in node.input:
            if not name:
                operands.append(None)
                continue
            full = TensorType.of(arrays[name])
            if name in weights:
                operands.append(Operand(full, weights[name]))
                continue
            named = {f"{name}_{k}": d for k, d in enumerate(full.dims)}
            sizes |= named
            dims = {"names": tuple(named), "unknown dims": (None,) * len(named), "unknown ranks": None}[openness]
            operands.append(Operand(full.with_shape(dims)))
        for said, result in zip(spec.infer(operands, attrs, len(results)), results, strict=True):
            holds(said, result, sizes)
    return results


def plain(value: Any) -> Any:
    """An attribute as the intermediate representation has it."""
    return value.decode() if isinstance(value, bytes) else tuple(value) if isinstance(value, list) else value


def holds(said: Any, result: np.ndarray, sizes: Mapping[str, int]) -> None:
    """A type inferred from open shapes is true of the result."""
    if said is None:
        return
    assert said.dtype.numpy == result.dtype
    if said.shape is not None:
        assert len(said.shape) == result.ndim
        assert all(d is None or sizes.get(d, d) == r for d, r in zip(said.shape, result.shape, strict=True)), (
            said,
            result.shape,
        )


@cache
def openvino_core() -> Any:
    return ov.Core()


def run_openvino(model: Any, feeds: Mapping[Any, np.ndarray]) -> list[np.ndarray]:
    """OpenVINO's CPU device in plain fp32: its low-precision mode moves the ranges of FakeQuantize a little."""
    if not isinstance(model, ov.Model):
        model = ov.Model(list(model.outputs()), [], "one")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "LP_TRANSFORMS_MODE": "NO"}
    compiled = openvino_core().compile_model(model, "CPU", settings)
    results = compiled(dict(feeds))
    return [np.array(results[k]) for k in range(len(compiled.outputs))]


def by_front_end(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The oracle where OpenVINO reads the ONNX model itself."""
    return run_openvino(openvino_core().read_model(model.SerializeToString()), feeds)


def create(opset: int, op: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """A node of an operation set; arrays become constants."""
    nodes = [ops.constant(v) if isinstance(v, np.ndarray) else v for v in inputs]
    outputs = [v.output(0) if hasattr(v, "outputs") else v for v in nodes]
    return factories.NodeFactory(f"opset{opset}").create(op, outputs, dict(attrs))


def by_operation_set(build: Callable[..., Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The oracle where the operator must be built: ``build(*parameters)`` gives a node."""
    parameters = [ops.parameter(list(v.shape), v.dtype) for v in inputs]
    node = build(*parameters)
    return run_openvino(ov.Model(list(node.outputs()), parameters, "one"), dict(enumerate(inputs)))


def by_reference(build: Callable[..., Any], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Like `by_operation_set` for one output, through OpenVINO's reference instead of its CPU device."""
    parameters = [ops.parameter(list(v.shape), v.dtype) for v in inputs]
    node = build(*parameters)
    model = ov.Model(list(node.outputs()), parameters, "one")
    result = ov.Tensor(node.output(0).get_element_type(), node.output(0).get_shape())
    assert model.evaluate([result], [ov.Tensor(v) for v in inputs])
    return [np.array(result.data)]


def same(got: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float = 1e-5) -> None:
    """Equal shapes and types; floating-point values within a part of the output's scale."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if a.dtype.kind == "f":
            scale = max(1.0, float(np.abs(b).max(initial=0.0)))
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)
        else:
            np.testing.assert_array_equal(a, b)


def check(
    op: str, inputs: Sequence[np.ndarray | None], attrs: Mapping[str, Any], n: int = 1, constant: Sequence[int] = ()
) -> list[np.ndarray]:
    """Our result and the front end's agree; returns ours."""
    model, feeds = one_node(op, inputs, attrs, n, constant), feeds_of(inputs, constant)
    got = ours(model, feeds)
    same(got, by_front_end(model, feeds))
    return got
