"""Small graphs for tests: written in ONNX's text form, run on the host, printed before and after a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser

from tunewright.devices.host import HostDevice
from tunewright.frontend.onnx import load
from tunewright.ir.graph import Graph
from tunewright.ir.types import TensorType
from tunewright.ops.infer import propagate
from tunewright.passes.base import Context, Pass, RepeatedPasses
from tunewright.passes.standard import SPECIALISE
from tunewright.runtime.plans.program import Environment, Program
from tunewright.runtime.requests.executor import Executor
from tunewright.settings import Settings
from tunewright.tuning.tuner import Tuner

HEADER = '<ir_version: 10, opset_import: ["" : 28, "org.openvinotoolkit" : 1, "com.microsoft" : 1]>\n'


def model(text: str, opset: int = 28) -> onnx.ModelProto:
    """A model from ``g (inputs) => (outputs) <declarations> { nodes }``.

    A declaration without a value that no node makes becomes a weight with small, varied, repeatable values.
    """
    proto = onnx.parser.parse_model(HEADER.replace('"" : 28', f'"" : {opset}') + text)
    made = {name for node in proto.graph.node for name in node.output}
    for info in list(proto.graph.value_info):
        if info.name not in made:
            shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(weight(shape, dtype), info.name))
            proto.graph.value_info.remove(info)
    return proto


def weight(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    size = int(np.prod(shape))
    return (((np.arange(size) * 7 + size) % 11 + 1) / 8).astype(dtype).reshape(shape)


def graph(text: str, opset: int = 28) -> Graph:
    """The IR of a model, types inferred, nothing folded."""
    result = load(model(text, opset), Settings()).graph
    for body in reversed(list(result.walk())):
        propagate(body)
    return result


def disabled(passes: Sequence[Pass | RepeatedPasses] = SPECIALISE, keep: Sequence[str] = ("propagate",)) -> Settings:
    """Settings under which the passes that run per shape do nothing but infer types."""
    names = {one.name for p in passes for one in (p.passes if isinstance(p, RepeatedPasses) else (p,))} - set(keep)
    return Settings.make({"DISABLED_PASSES": ",".join(sorted(names))}, Settings())


def inputs(of: Graph, seed: int = 0, sizes: dict[str, int] | None = None) -> list[np.ndarray[Any, Any]]:
    """Random inputs; symbolic dimensions get ``sizes``, else 2."""
    rng = np.random.default_rng(seed)
    arrays = []
    for value in of.inputs:
        assert isinstance(value.type, TensorType)
        shape = (2, 4, 3) if value.type.shape is None else value.type.shape
        dims = [d if isinstance(d, int) else (sizes or {}).get(str(d), 2) for d in shape]
        dtype = value.type.dtype.numpy
        if dtype == np.bool_:
            arrays.append(rng.random(dims) < 0.5)
        elif dtype.kind in "iu":
            arrays.append(rng.integers(0, 3, dims).astype(dtype))
        else:
            arrays.append(rng.standard_normal(dims).astype(dtype))
    return arrays


def run(of: Graph, arrays: Sequence[Any], settings: Settings | None = None) -> list[Any]:
    """The graph's outputs, through a plan on the host."""
    chosen = settings or disabled()
    device = HostDevice()
    env = Environment(device, Tuner(chosen), chosen, Context(chosen))
    return Executor(device).run(Program(of, env), arrays)


def assert_close(got: Sequence[Any], want: Sequence[Any], tolerance: float = 1e-4) -> None:
    """Equal shapes and types, values within ``tolerance`` of the output's scale; integers and booleans exactly."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype.kind != "f":
            np.testing.assert_array_equal(a, b)
            continue
        scale = float(np.abs(b[np.isfinite(b)]).max(initial=1.0))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)
