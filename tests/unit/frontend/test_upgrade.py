"""Operators of old opsets against what their old definitions say: onnxruntime where it runs them, else numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnx.defs
import pytest
from onnx import TensorProto, helper

from tunewright import Core
from tunewright.errors import ModelError
from tunewright.frontend.upgrade.upgrade import ADAPTERS

ort = pytest.importorskip("onnxruntime")

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Case:
    """One node at one opset. ``expected`` computes the outputs from the inputs; None: onnxruntime does."""

    op: str
    version: int
    inputs: Arrays
    attrs: Mapping[str, Any] = field(default_factory=dict)
    expected: Callable[..., Any] | None = None
    outputs: int = 1
    #: inputs that are initializers, by position
    constant: tuple[int, ...] = ()
    domain: str = ""
    note: str = ""

    @property
    def id(self) -> str:
        return f"{self.op}-{self.version}{'-' + self.note if self.note else ''}"


#: draws the tables of this module, once, when it is imported; tests draw from their own (the fixture rng)
TABLES = np.random.default_rng(7)
SEED = 1007


def f(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def i64(*values: int) -> np.ndarray:
    return np.asarray(values, np.int64)


def f32(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32)


def flags(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 2, shape).astype(bool)


def build(case: Case, shapes: bool) -> onnx.ModelProto:
    """The model; without ``shapes`` nothing but the element types of the inputs is declared."""
    names = [f"x{i}" for i in range(len(case.inputs))]
    infos, weights = [], []
    for i, (name, x) in enumerate(zip(names, case.inputs, strict=True)):
        kind = TensorProto.STRING if x.dtype == object else helper.np_dtype_to_tensor_dtype(x.dtype)
        if i in case.constant:
            weights.append(onnx.numpy_helper.from_array(x, name))
        else:
            infos.append(helper.make_tensor_value_info(name, kind, x.shape if shapes else None))
    outputs = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op, names, outputs, name="it", domain=case.domain, **case.attrs)
    results = [helper.make_empty_tensor_value_info(y) for y in outputs]
    graph = helper.make_graph([node], "g", infos, results, weights)
    opsets = [helper.make_opsetid(case.domain, case.version)]
    if case.domain:
        opsets.append(helper.make_opsetid("", 9))
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def feeds(case: Case) -> dict[str, np.ndarray]:
    return {f"x{i}": x for i, x in enumerate(case.inputs) if i not in case.constant}


def oracle(case: Case) -> Arrays:
    if case.expected is not None:
        result = case.expected(*case.inputs)
        return list(result) if isinstance(result, tuple) else [result]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    model = build(case, shapes=True).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds(case))


A = f(TABLES, 2, 3, 4, 5)
BINARY = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Less": np.less,
    "Greater": np.greater,
    "Pow": np.power,
}


def soft(x: np.ndarray, axis: int, log: bool = False) -> np.ndarray:
    flat = x.reshape(int(np.prod(x.shape[:axis])), -1).astype(np.float64)
    e = np.exp(flat - flat.max(1, keepdims=True))
    y = e / e.sum(1, keepdims=True)
    return (np.log(y) if log else y).reshape(x.shape).astype(np.float32)


def tiled(x: np.ndarray, tiles: np.ndarray, axis: np.ndarray) -> np.ndarray:
    return np.concatenate([x] * int(tiles), int(axis))


def trained(x: np.ndarray, s: np.ndarray, b: np.ndarray, m: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    column = [p.reshape(1, -1, 1, 1) for p in (mean, var, s, b)]
    y = (x - column[0]) / np.sqrt(column[1] + 1e-5) * column[2] + column[3]
    return y, m * 0.9 + mean * np.float32(0.1), v * 0.9 + var * np.float32(0.1), mean, var


def inferred(x: np.ndarray, s: np.ndarray, b: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
    s, b, m, v = (p.reshape(1, -1, 1, 1) if p.ndim == 1 else p for p in (s, b, m, v))
    return (x - m) / np.sqrt(v + np.float32(1e-5)) * s + b


def group_norm(x: np.ndarray, s: np.ndarray, b: np.ndarray) -> np.ndarray:
    g = x.reshape(x.shape[0], len(s), -1)
    y = (g - g.mean(2, keepdims=True)) / np.sqrt(g.var(2, keepdims=True) + 1e-5)
    return (y * s[:, None] + b[:, None]).reshape(x.shape).astype(np.float32)


def dft(x: np.ndarray, axis: int) -> np.ndarray:
    y = np.fft.fft(x[..., 0], axis=axis)
    return np.stack([y.real, y.imag], -1).astype(np.float32)


STATISTICS = (f(TABLES, 3), f(TABLES, 3), f(TABLES, 3), np.abs(f(TABLES, 3)))
PER_ACTIVATION = (f(TABLES, 3, 4, 5), f(TABLES, 3, 4, 5), f(TABLES, 3, 4, 5), np.abs(f(TABLES, 3, 4, 5)))
RECURRENT = {"LSTM": (12, 24), "GRU": (9, 18), "RNN": (3, 6)}

CASES = [
    # limited broadcasting
    *(
        Case(
            op,
            v,
            (np.abs(A), f(TABLES, 3, 4)),
            {"broadcast": 1, "axis": 1},
            lambda a, b, fn=fn: fn(a, b[:, :, None]).astype(fn(a, a).dtype),
            note="axis",
        )
        for op, fn in BINARY.items()
        for v in (1, 6)
    ),
    *(
        Case(op, 6, (A, f(TABLES, 4, 5)), {"broadcast": 1}, fn, note="suffix")
        for op, fn in BINARY.items()
        if op != "Pow"
    ),
    Case(
        "Add", 6, (A, f(TABLES, 2)), {"broadcast": 1, "axis": 0}, lambda a, b: a + b[:, None, None, None], note="first"
    ),
    Case("Add", 6, (A, f(TABLES, 3, 4)), {"broadcast": 1, "axis": -3}, lambda a, b: a + b[..., None], note="negative"),
    Case("Add", 6, (A, f(TABLES, 1)), {"broadcast": 1, "axis": 1}, np.add, note="one"),
    Case(
        "Add",
        6,
        (A, f(TABLES, 3)),
        {"broadcast": 1, "axis": 1},
        lambda a, b: a + b[:, None, None],
        constant=(1,),
        note="const",
    ),
    Case("Add", 1, (A, A), {"consumed_inputs": [0, 0]}, np.add, note="plain"),
    *(
        Case(
            op,
            1,
            (flags(TABLES, 2, 3, 4), flags(TABLES, 3)),
            {"broadcast": 1, "axis": 1},
            lambda a, b, fn=fn: fn(a, b[:, None]),
        )
        for op, fn in {"And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor}.items()
    ),
    Case(
        "Equal",
        1,
        (TABLES.integers(0, 2, (2, 3, 4)), TABLES.integers(0, 2, 3)),
        {"broadcast": 1, "axis": 1},
        lambda a, b: a == b[:, None],
    ),
    *(Case("PRelu", v, (A, f(TABLES, 3)), {}, lambda x, s: np.where(x < 0, x * s[:, None, None], x)) for v in (1, 6)),
    Case("PRelu", 6, (A, f(TABLES, 1)), {}, lambda x, s: np.where(x < 0, x * s, x), note="shared"),
    Case(
        "Gemm",
        6,
        (f(TABLES, 2, 3), f(TABLES, 3, 4), f(TABLES, 4)),
        {"broadcast": 1, "alpha": 0.5},
        lambda a, b, c: np.float32(0.5) * (a @ b) + c,
    ),
    # activations, casts
    Case(
        "Selu",
        1,
        (A,),
        {"consumed_inputs": [0]},
        lambda x: np.where(x > 0, 1.0507 * x, 1.0507 * (1.6732 * np.exp(np.minimum(x, 0)) - 1.6732)).astype("f"),
    ),
    Case("Relu", 1, (A,), {"consumed_inputs": [0]}, lambda x: np.maximum(x, 0)),
    Case("Cast", 1, (A,), {"to": "INT32"}, lambda x: x.astype(np.int32)),
    *(
        Case("Clip", v, (f32(-np.inf, -3, 0.5, 3, np.inf),), a)
        for v in (6, 10)
        for a in ({"min": -1.0, "max": 2.0}, {})
    ),
    Case("Clip", 6, (f32(-3, 1).astype(np.float16),), {"min": 0.0}, lambda x: np.maximum(x, 0), note="half"),
    *(
        Case(op, v, (A,), a, note=f"axis{a.get('axis', '')}")
        for op in ("Softmax", "LogSoftmax", "Hardmax")
        for v, a in (
            (7, {}),
            (8, {"axis": 2}),
            (9, {"axis": 3}),
            (11, {"axis": -1}),
            (12, {"axis": -3}),
            (12, {"axis": 0}),
        )
    ),
    Case("Softmax", 1, (A,), {"axis": 2}, lambda x: soft(x, 2)),
    # reductions
    *(
        Case(op, v, (np.abs(A),), a, note=f"{len(a)}")
        for op in (
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSum",
            "ReduceLogSumExp",
            "ReduceMax",
            "ReduceMean",
            "ReduceMin",
            "ReduceProd",
            "ReduceSum",
            "ReduceSumSquare",
        )
        for v in (7, 11, 13 if op != "ReduceSum" else 12)
        for a in ({"axes": [1, 2], "keepdims": 0}, {})
    ),
    Case("DFT", 17, (f(TABLES, 2, 6, 4, 1),), {"axis": 2}, lambda x: dft(x, 2)),
    Case("DFT", 17, (f(TABLES, 2, 6, 4, 1),), {}, lambda x: dft(x, 1), note="default"),
    # shapes
    Case("Concat", 1, (f(TABLES, 2, 3), f(TABLES, 2, 4)), {}, lambda a, b: np.concatenate([a, b], 1)),
    Case("Reshape", 1, (f(TABLES, 2, 6),), {"shape": [0, 3, -1]}, lambda x: x.reshape(2, 3, 2)),
    Case("Tile", 1, (f(TABLES, 2, 3), f32(3)[0:1].reshape(()), f32(1)[0:1].reshape(())), {}, tiled),
    Case("Tile", 1, (f(TABLES, 2, 3), f32(2), f32(0)), {}, lambda x, t, a: tiled(x, t[0], a[0]), note="vectors"),
    Case("Pad", 1, (f(TABLES, 2, 3),), {"paddings": [0, 1, 2, 0]}, lambda x: np.pad(x, ((0, 2), (1, 0)))),
    Case(
        "Pad",
        2,
        (f(TABLES, 2, 3),),
        {"pads": [0, 1, 2, 0], "value": 1.5},
        lambda x: np.pad(x, ((0, 2), (1, 0)), constant_values=1.5),
    ),
    *(
        Case("Pad", 10, (f(TABLES, 3, 4),), {"pads": [0, 1, 2, 0], "mode": m}, note=m)
        for m in ("constant", "reflect", "edge")
    ),
    *(
        Case("Slice", v, (A,), a)
        for v in (7, 9)
        for a in ({"starts": [1, -3], "ends": [9, -1], "axes": [1, 3]}, {"starts": [0, 1], "ends": [1, 100]})
    ),
    Case("Split", 1, (f(TABLES, 6, 2), i64(1, 5)), {"axis": 0}, lambda x, s: (x[:1], x[1:]), outputs=2),
    *(Case("Split", v, (f(TABLES, 2, 6),), {"axis": 1, "split": [1, 2, 3]}, outputs=3) for v in (7, 11)),
    *(Case("Split", v, (f(TABLES, 6, 2),), {}, outputs=3, note="equal") for v in (7, 11, 13, 17)),
    *(Case("Squeeze", v, (f(TABLES, 1, 3, 1),), a) for v in (7, 11) for a in ({"axes": [0]}, {})),
    *(Case("Unsqueeze", v, (f(TABLES, 3),), {"axes": [0, 2]}) for v in (7, 11)),
    *(Case("TopK", v, (f(TABLES, 3, 6),), {"k": 2, "axis": 1}, outputs=2) for v in (7, 9)),
    Case("TopK", 10, (f(TABLES, 3, 6), i64(2)), {}, outputs=2),
    Case("Scatter", 9, (f(TABLES, 3, 4), i64(0, 2).reshape(1, 2), f(TABLES, 1, 2)), {"axis": 1}),
    Case(
        "Upsample",
        1,
        (f(TABLES, 1, 2, 2, 3),),
        {"height_scale": 2.0, "width_scale": 3.0},
        lambda x: x.repeat(2, 2).repeat(3, 3),
    ),
    *(
        Case("Upsample", 7, (f(TABLES, 1, 2, 4, 3),), {"scales": [1.0, 1.0, 2.0, 1.5], "mode": m})
        for m in ("nearest", "linear")
    ),
    *(
        Case("Upsample", 9, (f(TABLES, 1, 2, 4, 3), f32(1, 1, 2, 1.5)), {"mode": m}, constant=c, note=f"{m}{c}")
        for m in ("nearest", "linear")
        for c in ((), (1,))
    ),
    *(
        Case("Resize", 10, (f(TABLES, 1, 1, 6, 7), f32(1, 1, *s)), {"mode": m}, constant=c, note=f"{m}{c}{s}")
        for m in ("nearest", "linear")
        for c in ((), (1,))
        for s in ((2, 1.5), (0.6, 0.5), (0.6, 2))
    ),
    *(
        Case(
            "Resize",
            11,
            (f(TABLES, 1, 1, 6, 7), f32(), f32(1, 1, *s)),
            {"mode": m, "nearest_mode": r, "coordinate_transformation_mode": "tf_half_pixel_for_nn"},
            constant=(1, 2),
            note=f"tf{r}{s}",
        )
        for m in ("nearest",)
        for r in ("floor", "round_prefer_floor")
        for s in ((2, 3), (0.5, 0.6))
    ),
    Case("Resize", 11, (f(TABLES, 1, 1, 4, 4), f32(), f32(), i64(1, 1, 3, 8)), {"mode": "linear"}, constant=(1, 2, 3)),
    Case(
        "RoiAlign",
        10,
        (f(TABLES, 1, 2, 8, 8), f32(0, 0, 5, 6, 1, 2, 7, 7).reshape(2, 4), i64(0, 0)),
        {"output_height": 3, "output_width": 2, "sampling_ratio": 2},
    ),
    *(
        Case("GridSample", 16, (f(TABLES, 1, 2, 4, 5), np.tanh(f(TABLES, 1, 3, 3, 2))), {"mode": m})
        for m in ("bilinear", "bicubic", "nearest")
    ),
    # layers
    *(Case("BatchNormalization", v, (A, *STATISTICS)) for v in (7, 9, 13)),
    *(
        Case("BatchNormalization", v, (A, *STATISTICS), {**a, "is_test": 1}, inferred)
        for v, a in ((1, {"consumed_inputs": [0, 0, 0, 1, 1]}), (6, {}))
    ),
    Case("BatchNormalization", 6, (A, *PER_ACTIVATION), {"is_test": 1, "spatial": 0}, inferred, note="per-activation"),
    Case("BatchNormalization", 7, (A, *PER_ACTIVATION), {"spatial": 0}, note="per-activation"),
    *(Case("BatchNormalization", v, (A, *STATISTICS), {}, trained, outputs=5, note="training") for v in (6, 9)),
    Case(
        "BatchNormalization",
        6,
        (A, *STATISTICS),
        {"is_test": 1},
        lambda x, s, b, m, v: (inferred(x, s, b, m, v), m, v, m, v),
        outputs=5,
        note="testing",
    ),
    *(Case("Dropout", v, (A,), {"ratio": 0.9}, lambda x: x) for v in (1, 6, 7, 10)),
    Case("Dropout", 7, (A,), {}, lambda x: (x, np.ones_like(x)), outputs=2, note="mask"),
    Case("Dropout", 10, (A,), {}, lambda x: (x, np.ones(x.shape, bool)), outputs=2, note="mask"),
    Case("GroupNormalization", 18, (f(TABLES, 2, 6, 3, 3), f(TABLES, 2), f(TABLES, 2)), {"num_groups": 2}, group_norm),
    *(
        Case(
            op,
            7,
            (f(TABLES, 4, 2, 5), f(TABLES, 1, g, 5), f(TABLES, 1, g, 3), f(TABLES, 1, b)),
            {"hidden_size": 3},
            outputs=2,
        )
        for op, (g, b) in RECURRENT.items()
    ),
    *(
        Case(
            "LpPool",
            v,
            (f(TABLES, 1, 2, 6, 6),),
            {"kernel_shape": [2, 2], "p": p, "strides": [2, 2]},
            lambda x, p=p: (np.abs(x).reshape(1, 2, 3, 2, 3, 2) ** p).sum((3, 5)) ** np.float32(1 / p),
        )
        for v, p in ((1, 3.0), (2, 1))
    ),
    Case(
        "GlobalLpPool",
        1,
        (f(TABLES, 1, 2, 6, 6),),
        {"p": 2.0},
        lambda x: np.sqrt((x**2).sum((2, 3), keepdims=True)).astype(np.float32),
    ),
    *(
        Case("MaxPool", v, (f(TABLES, 1, 2, 6, 7),), {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER"})
        for v in (7, 8, 10)
    ),
    *(
        Case("AveragePool", v, (f(TABLES, 1, 2, 6, 7),), {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1]})
        for v in (7, 10, 11)
    ),
    Case(
        "ConvTranspose", 10, (f(TABLES, 1, 2, 3, 3), f(TABLES, 2, 2, 3, 3)), {"output_shape": [6, 6], "strides": [2, 2]}
    ),
    # operators that are no longer in the standard
    Case("Affine", 1, (A,), {"alpha": 2.0, "beta": 0.5}, lambda x: 2 * x + np.float32(0.5)),
    Case("Scale", 1, (A,), {"scale": 2.0}, lambda x: 2 * x),
    Case("ScaledTanh", 1, (A,), {"alpha": 2.0, "beta": 0.5}, lambda x: 2 * np.tanh(x / 2)),
    Case("ParametricSoftplus", 1, (A,), {"alpha": 2.0, "beta": 0.5}, lambda x: 2 * np.log1p(np.exp(x / 2))),
    Case(
        "ImageScaler", 1, (A,), {"scale": 2.0, "bias": [1.0, 2.0, 3.0]}, lambda x: 2 * x + f32(1, 2, 3)[:, None, None]
    ),
    Case("Crop", 1, (A,), {"border": [1, 0, 2, 1]}, lambda x: x[:, :, :3, 1:3]),
    Case("Crop", 1, (A,), {"border": [1, 1, 0, 0], "scale": [2, 3]}, lambda x: x[:, :, 1:3, 1:4], note="size"),
    Case("DynamicSlice", 1, (A, i64(1), i64(3), i64(2)), {}, lambda x, *_: x[:, :, 1:3]),
    Case(
        "MeanVarianceNormalization",
        8,
        (A,),
        {"across_channels": 1, "normalize_variance": 0},
        lambda x: x - x.mean((1, 2, 3), keepdims=True),
    ),
    # ai.onnx.ml
    Case(
        "LabelEncoder", 1, (np.asarray(["b", "a", "z"], object),), {"classes_strings": ["a", "b"]}, domain="ai.onnx.ml"
    ),
    Case("LabelEncoder", 1, (i64(1, 0, 7),), {"classes_strings": ["a", "b"]}, domain="ai.onnx.ml", note="back"),
]


@pytest.mark.parametrize("shapes", [True, False], ids=["static", "unknown"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_old_form(case: Case, shapes: bool) -> None:
    # kernels are compiled for one of the two: this is about what the operation becomes
    results = Core().compile_model(build(case, shapes), "CPU" if shapes else "CPU.HOST")(feeds(case))
    for got, want in zip(results.values(), oracle(case), strict=True):
        want = np.asarray(want)
        assert got.shape == want.shape
        if want.dtype == object:
            assert got.tolist() == want.tolist()
            continue
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_scan_over_a_batch_with_lengths(rng: np.random.Generator) -> None:
    """The first form of Scan: a running sum over each sample of a batch, as far as the sample goes."""
    row = [TensorProto.FLOAT, [2]]
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Mul", ["t", "factor"], ["y"])],
        "body",
        [helper.make_tensor_value_info(n, *row) for n in "sx"],
        [helper.make_tensor_value_info(n, *row) for n in "ty"],
    )
    node = helper.make_node("Scan", ["n", "s0", "xs"], ["end", "ys"], num_scan_inputs=1, body=body)
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info("n", TensorProto.INT64, [3]),
            helper.make_tensor_value_info("s0", TensorProto.FLOAT, [3, 2]),
            helper.make_tensor_value_info("xs", TensorProto.FLOAT, [3, 4, 2]),
            helper.make_tensor_value_info("factor", TensorProto.FLOAT, [1]),
        ],
        [helper.make_empty_tensor_value_info(n) for n in ("end", "ys")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=8)
    start, rows, lengths = f(rng, 3, 2), f(rng, 3, 4, 2), i64(4, 1, 2)
    result = Core().compile_model(model)({"n": lengths, "s0": start, "xs": rows, "factor": f32(2)})
    for sample, length in enumerate(lengths):
        sums = start[sample] + np.cumsum(rows[sample, :length], 0)
        np.testing.assert_allclose(result["end"][sample], sums[-1], rtol=1e-5)
        np.testing.assert_allclose(result["ys"][sample, :length], 2 * sums, rtol=1e-5)
        assert not result["ys"][sample, length:].any()


def _flex(inputs: dict[str, Any], shapes: bool) -> onnx.ModelProto:
    """FlexAttention with graphs of the model's own, for inputs of these types."""
    kind = inputs["q"].dtype
    inner = TensorProto.DOUBLE if kind == np.float64 else TensorProto.FLOAT
    bodies = {}
    for name, factor in (("score_mod", 0.5), ("prob_mod", 3.0)):
        constant = helper.make_tensor("k", inner, [], [factor])
        bodies[name] = helper.make_graph(
            [helper.make_node("Mul", ["s", "k"], ["t"])],
            name,
            *([helper.make_tensor_value_info(n, inner, None)] for n in "st"),
            [constant],
        )
    node = helper.make_node("FlexAttention", list(inputs), ["y"], domain="ai.onnx.preview", **bodies)
    code = helper.np_dtype_to_tensor_dtype(kind)
    infos = [helper.make_tensor_value_info(n, code, x.shape if shapes else None) for n, x in inputs.items()]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", code, None)])
    opsets = [helper.make_opsetid("", 26), helper.make_opsetid("ai.onnx.preview", 1)]
    return helper.make_model(graph, opset_imports=opsets)


@pytest.mark.parametrize("shapes", [True, False], ids=["static", "unknown"])
@pytest.mark.parametrize("kind", [np.float32, np.float16, np.float64])
def test_flex_attention(shapes: bool, kind: type) -> None:
    """Four query heads on two of keys; onnx.reference is the oracle.

    In halves it rounds after each node, as we do without `widen-halves`. With it we are nearer to single precision.
    """
    from onnx.reference import ReferenceEvaluator

    rng, dims = np.random.default_rng(0), {"q": (2, 4, 3, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 6)}
    inputs = {name: rng.standard_normal(shape).astype(kind) for name, shape in dims.items()}
    is_half, model = kind is np.float16, _flex(inputs, shapes)
    (want,) = ReferenceEvaluator(model).run(None, inputs)
    (got,) = Core({"DISABLED_PASSES": "widen-halves"} if is_half else {}).compile_model(model)(inputs).values()
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-5 if not is_half else 2e-3, atol=1e-5)
    if is_half:
        single = {n: x.astype(np.float32) for n, x in inputs.items()}
        (exact,) = ReferenceEvaluator(_flex(single, shapes)).run(None, single)
        (widened,) = Core().compile_model(model)(inputs).values()
        off, allowed = (np.abs(array.astype(np.float32) - exact).max() for array in (widened, want))
        assert widened.dtype == want.dtype and off <= allowed < 5e-3


def test_a_malformed_old_call_names_its_node() -> None:
    node = helper.make_node("Reshape", ["x"], ["y"], name="it")
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", 1, [2])], [helper.make_empty_tensor_value_info("y")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 1)], ir_version=3)
    with pytest.raises(ModelError, match=r"'it' \(Reshape\).*shape"):
        Core().read_model(model)


#: breaks that need no adapter, with the reason
KEPT = {
    ("ai.onnx.ml::TreeEnsembleClassifier", 5): "has a definition of its own",
    ("ai.onnx.ml::TreeEnsembleRegressor", 5): "has a definition of its own",
}


def breaks() -> list[tuple[str, int]]:
    """(op, version) of every change in onnx's history after which an old node means something else, or nothing."""
    history: dict[str, list[Any]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain in ("", "ai.onnx.ml"):
            name = f"{schema.domain}::{schema.name}" if schema.domain else schema.name
            history.setdefault(name, []).append(schema)
    found = []
    for op, schemas in history.items():
        schemas.sort(key=lambda s: s.since_version)
        for old, new in pairwise(schemas):
            fewer = len(new.inputs) < len(old.inputs)
            if new.deprecated or fewer or _attributes_break(old, new) or _needs_more(old, new):
                found.append((op, new.since_version))
    return sorted(found)


def _attributes_break(old: Any, new: Any) -> bool:
    for name, attribute in old.attributes.items():
        if name == "consumed_inputs":
            continue
        if name not in new.attributes or new.attributes[name].type != attribute.type:
            return True
        now = new.attributes[name]
        if not attribute.required and (now.required or now.default_value != attribute.default_value):
            return True
    return False


def _needs_more(old: Any, new: Any) -> bool:
    """A new input that every node must have."""
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return any(parameter.option == single for parameter in new.inputs[len(old.inputs) :])


@pytest.mark.parametrize(("op", "version"), breaks(), ids=lambda v: str(v))
def test_every_break_has_an_adapter(op: str, version: int) -> None:
    adapted = any(since >= version for since, _ in ADAPTERS.get(op, ()))
    assert adapted or (op, version) in KEPT
