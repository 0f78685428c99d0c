"""The light models of the onnx package with random weights: real networks, without their training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

NAMES = ("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19",
         "zfnet512")  # fmt: skip


def load(name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray[Any, Any]]]:
    """A light model and inputs for it. Its weights are one constant: they are drawn at random here instead."""
    path = Path(onnx.__file__).parent / "backend/test/data/light" / f"light_{name}.onnx"
    model = onnx.load(path)
    rng = np.random.default_rng(0)
    graph = model.graph
    given = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    fills = [n for n in graph.node if n.op_type == "ConstantOfShape"]
    for node in fills:
        shape = tuple(int(d) for d in given[node.input[0]])
        scale = np.sqrt(2 / max(1, int(np.prod(shape[1:])))) if len(shape) > 1 else 0.1
        array = (rng.standard_normal(shape) * scale).astype(np.float32)
        graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
        graph.node.remove(node)
    for tensor in graph.initializer:  # statistics of normalisations: variances must not be negative
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and array.ndim == 1:
            drawn = np.abs(rng.normal(1, 0.1, array.shape)).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(drawn, tensor.name))
    names = {t.name for t in graph.initializer}
    inputs = [i for i in graph.input if i.name not in names]
    kept = [i for i in inputs if any(i.name in n.input for n in graph.node)]
    del graph.input[:]
    graph.input.extend(kept)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in kept}
    model.ir_version = max(model.ir_version, 4)  # initializers need not be inputs
    return model, {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
