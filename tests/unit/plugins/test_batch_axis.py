"""Whether examples are independent is proven from the graph: what is proven is true, and what is not is said."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import parser

from tunewright import Core
from tunewright.errors import TunewrightError
from tunewright.frontend.onnx import load
from tunewright.ir.graph import Graph, Node
from tunewright.ir.types import TensorType
from tunewright.ops import lookup, names
from tunewright.ops.base import OpSpec, Sample
from tunewright.ops.batch_rules import Unproven
from tunewright.ops.infer import propagate
from tunewright.plugins.batching.batch_axis import _Proof, batched, why_not
from tunewright.settings import Settings
from tunewright.testing import models

HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
SAMPLED = [name for name in names() if (spec := lookup(name)) is not None and spec.samples and spec.pure]
#: what most networks are made of
COMMON = {
    "Conv", "ConvTranspose", "MaxPool", "AveragePool", "GlobalAveragePool", "BatchNormalization", "LayerNormalization",
    "InstanceNormalization", "Softmax", "MatMul", "Gemm", "Add", "Relu", "Clip", "Cast", "Reshape", "Transpose",
    "Concat", "Split", "Slice", "Gather", "ReduceMean", "Resize", "Pad", "Where", "LSTM", "GRU", "QuantizeLinear",
    "ArgMax", "DequantizeLinear", "QLinearMatMul", "MatMulInteger", "Attention", "Expand", "Squeeze", "TopK",
}  # fmt: skip


def _graph(name: str, sample: Sample, tracked: list[int]) -> tuple[Graph, Node]:
    graph = Graph()
    inputs = [
        None if x is None else graph.add_input(f"x{i}", TensorType.of(x)) if i in tracked else graph.constant(x)
        for i, x in enumerate(sample.inputs)
    ]
    node = graph.add(name, inputs, sample.attrs, outputs=sample.outputs)
    propagate(graph)
    return graph, node


def _cases(sample: Sample) -> Iterator[tuple[dict[int, int], int]]:
    """Inputs with the axis of their examples, and how many: one input, or the first two."""
    arrays = {i: x for i, x in enumerate(sample.inputs) if isinstance(x, np.ndarray) and x.dtype != object}
    for i, x in arrays.items():
        for axis, size in enumerate(x.shape):
            yield from (({i: axis}, count) for count in range(2, size + 1) if size % count == 0)
    for several in ([0, 1], [0, 1, 2], [0, 3]):
        if all(i in arrays for i in several):
            for axis in range(min(arrays[i].ndim for i in several)):
                for other in range(arrays[several[-1]].ndim):
                    axes = dict.fromkeys(several, axis) | {several[-1]: other}
                    sizes = {arrays[i].shape[a] for i, a in axes.items()}
                    if len(sizes) == 1 and (count := sizes.pop()) > 1:
                        yield axes, count


def _alone(spec: OpSpec, sample: Sample, axes: dict[int, int], count: int) -> list[list[Any]] | None:
    """The results of each example by itself; None: it cannot be by itself."""
    found = []
    for number in range(count):
        inputs = list(sample.inputs)
        for i, axis in axes.items():
            inputs[i] = np.split(inputs[i], count, axis)[number]
        try:
            found.append(list(spec.reference(inputs, sample.attrs, sample.outputs))[: sample.outputs])
        except Exception:  # such a model would not compile for one example
            return None
    return found


@pytest.mark.parametrize("name", SAMPLED)
def test_what_is_proven_is_true(name):
    """Every operator on its samples: where a rule says that examples stay apart, each has its results by itself."""
    spec = lookup(name)
    proven = 0
    with np.errstate(all="ignore"):
        for sample in spec.samples(np.random.default_rng(0)):
            for axes, count in _cases(sample):
                try:
                    graph, node = _graph(name, sample, list(axes))
                    proof = _Proof(graph, count)
                    for value, axis in zip(graph.inputs, axes.values(), strict=True):
                        proof.before[value] = int(np.prod(value.tensor.dims[:axis]))
                        if proof.axis(value) != axis:
                            raise Unproven
                    proof._follow(node)
                    places = [proof.axis(value) for value in node.outputs]
                except (Unproven, TunewrightError):
                    continue
                parts = _alone(spec, sample, axes, count)
                if parts is None:
                    continue
                whole = list(spec.reference(list(sample.inputs), sample.attrs, sample.outputs))[: sample.outputs]
                shares = [[np.split(w, count, p)[0].shape for w, p in zip(whole, places, strict=True)]] * count
                if shares != [[part.shape for part in own] for own in parts]:
                    continue  # a constant has the batch in it: compiling says so
                for k, place in enumerate(places):
                    together = np.concatenate([part[k] for part in parts], place)
                    what = f"output {k}, {count} examples along {axes}, {dict(sample.attrs)}"
                    np.testing.assert_allclose(whole[k], together, 1e-4, 1e-5, err_msg=what)
                proven += 1
    assert proven or name not in COMMON, "nothing was proven of it"


PROVEN = {
    "views": """g (float[1, 6, 4] x) => (float[1, 12, 2] y) <int64[3] s = {-1, 12, 2}, int64[1] a = {0}>
        { f = Flatten<axis = 2>(x)  t = Transpose<perm = [1, 0]>(f)  b = Transpose<perm = [1, 0]>(t)
          u = Unsqueeze(b, a)  v = Squeeze(u, a)  y = Reshape(v, s) }""",
    "shapes": """g (float[1, 8] x) => (float[1, 2, 4] y) <int64[1] i = {0}, int64[2] r = {2, 4}>
        { d = Shape(x)  n = Gather(d, i)  s = Concat<axis = 0>(n, r)  y = Reshape(x, s) }""",
    "tokens": """g (int64[1, 5] x) => (float[1, 5, 5] y) <float[9, 4] w = {WORDS}, float[1, 5, 4] p = {PLACES}>
        { e = Gather(w, x)  h = Add(e, p)  t = Transpose<perm = [0, 2, 1]>(h)  m = MatMul(h, t)  y = Softmax(m) }""",
    "zeros": """g (float[1, 8] x) => (float[1, 8] y) <float[1] o = {0}>
        { s = Shape(x)  z = ConstantOfShape(s)  y = Add(x, z) }""",
    "shared": "g (float[1, 8] x) => (float[1, 8] y) <float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = Mul(x, w) }",
}


def _model(text: str) -> Any:
    numbers = {"WORDS": 36, "PLACES": 20}
    for name, count in numbers.items():
        text = text.replace(name, ", ".join(str(n / 10) for n in range(count)))
    return load(parser.parse_model(HEAD + text), Settings())


@pytest.mark.parametrize("name", PROVEN)
def test_models_that_are_proven(name):
    model = _model(PROVEN[name])
    assert why_not(model, Settings()) == ""
    [key] = model.inputs
    type = model.inputs[key]
    rng = np.random.default_rng(0)
    examples = [(rng.random(type.dims) * 8).astype(type.dtype.numpy) for _ in range(3)]
    together = Core().compile_model(batched(model, 3), "CPU.HOST")({key: np.concatenate(examples)})["y"]
    alone = Core().compile_model(model, "CPU.HOST")
    np.testing.assert_allclose(together, np.concatenate([alone({key: x})["y"] for x in examples]), rtol=1e-5)


def test_networks_are_proven():
    for made in (models.resnet(), models.mobilenet(), models.transformer(layers=1, hidden=32, heads=2, length=8)):
        model = load(made, Settings())
        why = why_not(model, Settings())
        assert why == "" or "cannot become [1" in why, "this one has its batch written into a Reshape"


UNPROVEN = {
    "mixing": ("g (float[1, 8] x) => (float[1, 8] y) <int64[1] a = {0}> { m = ReduceMax(x, a)  y = Sub(x, m) }",
               "ReduceMax 'm' works along the axis of the examples"),
    "all": ("g (float[1, 8] x) => (float[1, 8] y) { m = ReduceMax(x)  y = Sub(x, m) }", "ReduceMax.*axis"),
    "softmax": ("g (float[1, 8] x) => (float[1, 8] y) { y = Softmax<axis = 0>(x) }", "Softmax 'y' works along"),
    "product": ("g (float[1, 8] x) => (float[1, 8] y) { t = Transpose(x)  m = MatMul(t, x)  y = MatMul(x, m) }",
                "MatMul 'm' (adds up|has examples)"),
    "norm": ("g (float[1, 8] x) => (float[1, 8] y) <float[8] s = {1, 1, 1, 1, 1, 1, 1, 1}> "
             "{ y = LayerNormalization<axis = 0>(x, s) }", "works along"),
    "dynamic": ("g (float[1, 8] x) => (float[1, 8] y) { q, s, z = DynamicQuantizeLinear(x)  "
                "y = DequantizeLinear(q, s, z) }", "DynamicQuantizeLinear.*is not known to keep examples independent"),
    "branch": ("g (float[1, 8] x, bool[1] c) => (float[1, 8] y) { y = If(c) <then_branch = t () => (float[1, 8] p) "
               "{ p = Neg(x) }, else_branch = e () => (float[1, 8] q) { q = Abs(x) }> }", "If 'y' is not known"),
    "numbered": ("g (float[1, 8] x) => (float[1, 8] y) <int64 z = {0}, int64 o = {1}, int64[1] a = {1}> "
                 "{ s = Shape(x)  n = Gather(s, z)  r = Range(z, n, o)  f = Cast<to = 1>(r)  u = Unsqueeze(f, a)  "
                 "y = Add(x, u) }",
                 "differs from example"),
    "counted": ("g (float[1, 8] x) => (float[1, 8] y) <int64 z = {0}> { s = Shape(x)  n = Gather(s, z)  "
                "f = Cast<to = 1>(n)  y = Div(x, f) }", "Div 'y' takes .*depends on the number of examples"),
    "cut": ("g (float[1, 8] x) => (float[1] y) <int64[1] z = {0}, int64[1] o = {1}> { s = Shape(x)  n = Gather(s, z)  "
            "c = Slice(x, z, n, o)  y = ReduceSum<keepdims = 0>(c, o) }", "has sizes that depend on the number"),
    "moved": ("g (float[1, 8] x) => (float[1] y) <int64[1] z = {0}, int64[1] o = {1}> "
              "{ s = Shape(x)  n = Gather(s, z)  e = Add(n, o)  c = Slice(x, n, e, o)  "
              "y = ReduceSum<keepdims = 0>(c, o) }",
              "Slice 'c' takes .*depends on the number"),
    "turned": ("g (float[1, 8] x) => (float[1, 8] y) <int64[1] b = {-1}, int64[1] e = {-100}, int64[1] a = {0}, "
               "int64[1] s = {-1}> { y = Slice(x, b, e, a, s) }", "turns examples round"),
    "constant": ("g (float[1, 8] x) => (float[1, 8] y) <float[1, 8] c = {1, 2, 3, 4, 5, 6, 7, 8}> { y = Identity(c) }",
                 "output 'y|'c"),
    "indices": ("g (float[1, 1, 4, 4] x) => (float[1, 1, 2, 2] y, int64[1, 1, 2, 2] i) "
                "{ y, i = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) }", "positions in the whole batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPROVEN)
def test_models_that_are_not(name):
    text, why = UNPROVEN[name]
    model = load(parser.parse_model(HEAD + text), Settings())
    assert re.search(why, why_not(model, Settings()))
