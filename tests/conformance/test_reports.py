"""Kernels report what is wrong with their inputs: every operation that looks things up, against ONNX Runtime.

What is wrong is told in the words of the reference, and names the node. Legal values at the ends of their range are no
reason to complain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from helpers import opencl_runtime
from tunewright import Core, ExecutionError
from tunewright.plugins.single import open_device

ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")

#: draws the tables of this module, once, when it is imported; tests draw from their own (the fixture rng)
TABLES = np.random.default_rng(0)
SEED = 1000
I64 = np.iinfo(np.int64)
#: far out of range; those of 64 bits look legal where only 32 are read
FAR = (2**31 - 1, -(2**31), 2**32, 2**32 + 1, -(2**32), 2**62, I64.max, I64.min)
OPENCL = pytest.param(opencl_runtime.NAME, marks=opencl_runtime.needs_opencl)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Lookup:
    """One node, an input of which holds numbers from ``low`` to ``high``; legal ones are given."""

    op: str
    inputs: Sequence[np.ndarray | None]
    at: int
    low: int
    high: int
    #: what is said of another number
    says: str
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    domain: str = ""
    types: tuple[Any, ...] = (np.int32, np.int64)
    opset: int = 21

    def given(self, dtype: Any) -> list[np.ndarray | None]:
        return [a if i != self.at or a is None else a.astype(dtype) for i, a in enumerate(self.inputs)]

    def model(self, dtype: Any) -> onnx.ModelProto:
        given = self.given(dtype)
        names = ["" if a is None else f"i{k}" for k, a in enumerate(given)]
        results = [f"o{k}" for k in range(self.outputs)]
        node = helper.make_node(self.op, names, results, "the_node", domain=self.domain, **self.attrs)
        infos = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in zip(names, given, strict=True)
            if a is not None
        ]
        graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info(o) for o in results])
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def wrong(self, dtype: Any) -> list[int]:
        info = np.iinfo(dtype)
        found = {self.low - 1, self.high + 1, self.high + 100, *FAR}
        return sorted(v for v in found if info.min <= v <= info.max and not self.low <= v <= self.high)


def index(size: int) -> dict[str, Any]:
    return {"low": -size, "high": size - 1, "says": f"an index is out of range: {{}} for an axis of {size}"}


def row(count: int) -> dict[str, Any]:
    return {"low": 0, "high": count - 1, "says": f"an index is out of range: {{}}, not 0 to {count - 1}"}


def length(steps: int) -> dict[str, Any]:
    return {"low": 0, "high": steps, "says": f"a sequence length is out of range: {{}}, not 0 to {steps}"}


def recurrent(rng: np.random.Generator, op: str, gates: int, steps: int, direction: str = "forward") -> Lookup:
    count = 2 if direction == "bidirectional" else 1
    weights = [floats(rng, count, gates * 5, 3), floats(rng, count, gates * 5, 5)]
    lengths = np.full(7, steps)
    attrs = {"hidden_size": 5, "direction": direction}
    return Lookup(
        op, [floats(rng, steps, 7, 3), *weights, None, lengths], 4, **length(steps), attrs=attrs, types=(np.int32,)
    )


def quantised_lstm(rng: np.random.Generator) -> Lookup:
    weights = [rng.integers(-9, 9, (1, 3, 20)).astype(np.int8), rng.integers(-9, 9, (1, 5, 20)).astype(np.int8)]
    scale = [np.full(1, 0.01, np.float32), np.zeros(1, np.int8)]
    given = [floats(rng, 4, 7, 3), *weights, None, np.full(7, 4), None, None, None, *scale, *scale]
    name = "DynamicQuantizeLSTM"
    return Lookup(
        name, given, 4, **length(4), attrs={"hidden_size": 5}, domain="com.microsoft", types=(np.int32,)
    )  # fmt: skip


def embedding(rng: np.random.Generator, at: int, rows: int) -> Lookup:
    ids, segments = np.ones((2, 7), np.int32), np.ones((2, 7), np.int32)
    positions = np.tile(np.arange(7, dtype=np.int32), (2, 1))
    given = [
        ids,
        segments,
        floats(rng, 11, 8),
        floats(rng, 9, 8),
        floats(rng, 2, 8),
        floats(rng, 8),
        floats(rng, 8),
        None,
        positions,
    ]
    return Lookup(
        "EmbedLayerNormalization", given, at, **row(rows), outputs=2, domain="com.microsoft", types=(np.int32,)
    )  # fmt: skip


X = floats(TABLES, 7, 5)
AT = TABLES.permutation(33).reshape(3, 11) % 5
BOXES = np.array([[0, 0, 3, 3], [1, 1, 4, 5], [0, 2, 5, 4]], np.float32)
TOKENS = np.tile(np.arange(5), (2, 1))
UNPOOL = np.arange(12).reshape(1, 2, 2, 3) * 3
LOOKUPS = {
    "Gather": Lookup("Gather", [X, AT], 1, **index(7)),
    "Gather, last axis": Lookup("Gather", [X, AT], 1, **index(5), attrs={"axis": -1}),
    "Gather, many bytes": Lookup("Gather", [floats(TABLES, 4, 70000), np.zeros(3, int)], 1, **index(4)),
    "Gather, many indices": Lookup("Gather", [floats(TABLES, 13), TABLES.integers(-13, 13, 60001)], 1, **index(13)),
    "Gather, scalar": Lookup("Gather", [X, np.array(3)], 1, **index(7)),
    "Gather, bool": Lookup("Gather", [X > 0, AT], 1, **index(7)),
    "GatherElements": Lookup("GatherElements", [X, AT[:, :5]], 1, **index(7)),
    "GatherElements, last axis": Lookup("GatherElements", [X, AT], 1, **index(5), attrs={"axis": 1}),
    "GatherElements, many": Lookup(
        "GatherElements", [floats(TABLES, 3, 9), TABLES.integers(-9, 9, (3, 20001))], 1, **index(9), attrs={"axis": 1}
    ),
    "GatherND": Lookup("GatherND", [floats(TABLES, 5, 5, 3), AT[:, :2]], 1, **index(5), types=(np.int64,)),
    "GatherND, batch": Lookup(
        "GatherND", [floats(TABLES, 3, 5, 2), AT[:, :1]], 1, **index(5), attrs={"batch_dims": 1}, types=(np.int64,)
    ),
    "ScatterElements": Lookup("ScatterElements", [X, AT[:, :1], floats(TABLES, 3, 1)], 1, **index(7)),
    "ScatterElements, sum": Lookup(
        "ScatterElements", [X, AT, floats(TABLES, 3, 11)], 1, **index(5), attrs={"axis": 1, "reduction": "add"}
    ),
    "ScatterND": Lookup("ScatterND", [floats(TABLES, 5, 5, 3), AT[:, :2], floats(TABLES, 3, 3)], 1, **index(5),
        types=(np.int64,)),
    "ScatterND, wide": Lookup(
        "ScatterND", [floats(TABLES, 5, 4000), AT[0, :3, None], floats(TABLES, 3, 4000)], 1, **index(5),
            types=(np.int64,)
    ),
    "TensorScatter": Lookup(
        "TensorScatter", [floats(TABLES, 3, 2, 9, 4), floats(TABLES, 3, 2, 2, 4), np.array([0, 3, 7])], 2, **row(8),
        types=(np.int64,), opset=24,
    ),
    "TensorScatter, circular": Lookup(
        "TensorScatter", [floats(TABLES, 3, 2, 9, 4), floats(TABLES, 3, 2, 2, 4), np.array([0, 3, 70])], 2, 0, I64.max,
        "an index is out of range: {} is negative", attrs={"mode": "circular"}, types=(np.int64,),
        opset=24,
    ),
    "MaxUnpool": Lookup(
        "MaxUnpool", [floats(TABLES, 1, 2, 2, 3), UNPOOL], 1, **row(48), types=(np.int64,),
        attrs={"kernel_shape": [2, 2], "strides": [2, 2]},
    ),
    "ReverseSequence": Lookup("ReverseSequence", [floats(TABLES, 6, 5, 3), np.arange(5)], 1, **length(6),
        types=(np.int64,)),
    "LSTM": recurrent(TABLES, "LSTM", 4, 6),
    "LSTM, one step": recurrent(TABLES, "LSTM", 4, 1),
    "GRU": recurrent(TABLES, "GRU", 3, 6, "bidirectional"),
    "RNN": recurrent(TABLES, "RNN", 1, 6, "reverse"),
    "DynamicQuantizeLSTM": quantised_lstm(TABLES),
    "RoiAlign": Lookup(
        "RoiAlign", [floats(TABLES, 2, 3, 9, 9), BOXES, np.array([0, 1, 1])], 2, **row(2), types=(np.int64,),
        attrs={"output_height": 2, "output_width": 2},
    ),
    "RotaryEmbedding": Lookup(
        "RotaryEmbedding", [floats(TABLES, 2, 3, 5, 8), floats(TABLES, 9, 4), floats(TABLES, 9, 4), TOKENS], 3,
            **row(9), types=(np.int64,),
        opset=23,
    ),
    "com.microsoft::RotaryEmbedding": Lookup(
        "RotaryEmbedding", [floats(TABLES, 2, 3, 5, 8), TOKENS, floats(TABLES, 9, 4), floats(TABLES, 9, 4)], 1,
            **row(9),
        domain="com.microsoft", types=(np.int64,),
    ),
    "EmbedLayerNormalization, words": embedding(TABLES, 0, 11),
    "EmbedLayerNormalization, segments": embedding(TABLES, 1, 2),
    "EmbedLayerNormalization, positions": embedding(TABLES, 8, 9),
    "Attention, keys": Lookup(
        "Attention", [floats(TABLES, 3, 2, 4, 8), *[floats(TABLES, 3, 2, 7, 8)] * 2, None, None, None,
            np.array([7, 1, 0])], 6,
        **length(7), types=(np.int64,), opset=24,
    ),
}  # fmt: skip


def places(array: np.ndarray) -> list[int]:
    return sorted({0, array.size // 2, array.size - 1})


def feeds(inputs: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
    return {f"i{k}": a for k, a in enumerate(inputs) if a is not None}


def message(request: Any, inputs: Mapping[str, np.ndarray]) -> str:
    with pytest.raises(ExecutionError) as caught:
        request.infer(inputs)
    return str(caught.value)


def wrong_feeds(lookup: Lookup, dtype: Any) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Each wrong number at each place."""
    given = lookup.given(dtype)
    held = given[lookup.at]
    assert held is not None
    for value in lookup.wrong(dtype):
        for place in places(held):
            array = held.copy()
            array.reshape(-1)[place] = value
            given[lookup.at] = array
            yield value, feeds(given)


@pytest.mark.parametrize("device", ["CPU", OPENCL])
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookup(name: str, device: str) -> None:
    lookup = LOOKUPS[name]
    for dtype in lookup.types:
        model = lookup.model(dtype)
        request = Core().compile_model(model, device, {"HOST_FALLBACK": "NO"}).create_infer_request()
        host = Core().compile_model(model, "CPU.HOST").create_infer_request()
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        legal = feeds(lookup.given(dtype))
        before = session.run(None, legal)
        for value, wrong in wrong_feeds(lookup, dtype):
            said = message(request, wrong)
            assert said == f"node 'the_node' ({'::'.join(filter(None, [lookup.domain, lookup.op]))}): " + (
                lookup.says.format(value)
            )
            assert message(host, wrong) == said
            with pytest.raises(Exception, match="the_node"):
                session.run(None, wrong)
        # what went wrong is forgotten
        for result, want in zip(request.infer(legal).values(), before, strict=True):
            np.testing.assert_allclose(result, want, rtol=1e-2 if "Quantize" in lookup.op else 1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["CPU", OPENCL])
@pytest.mark.parametrize("name", LOOKUPS)
def test_ends_are_legal(name: str, device: str) -> None:
    lookup = LOOKUPS[name]
    for dtype in lookup.types:
        request = Core().compile_model(lookup.model(dtype), device, {"HOST_FALLBACK": "NO"}).create_infer_request()
        given = lookup.given(dtype)
        held = given[lookup.at]
        assert held is not None
        for value in {lookup.low, lookup.high, 0, -1} - set(lookup.wrong(dtype)):
            if lookup.low <= value:
                for place in places(held):
                    array = held.copy()
                    array.reshape(-1)[place] = value
                    given[lookup.at] = array
                    request.infer(feeds(given))


DIVIDED = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("device", ["CPU", OPENCL])
@pytest.mark.parametrize("dtype", DIVIDED)
@pytest.mark.parametrize("op", ["Div", "Mod", "Mod, fmod"])
def test_division_by_zero(rng: np.random.Generator, op: str, dtype: Any, device: str) -> None:
    attrs = {"fmod": 1} if "fmod" in op else {}
    for shape, other in (((7, 5), (7, 5)), ((7, 5), (5,)), ((3, 1, 5), (4, 1)), ((7, 5), ()), ((20001,), (20001,))):
        x = rng.integers(0, 100, shape).astype(dtype)
        y = rng.integers(1, 100, other).astype(dtype)
        lookup = Lookup(op.partition(",")[0], [x, y], 1, 1, 99, "an integer is divided by zero", attrs)
        model = lookup.model(dtype)
        request = Core().compile_model(model, device, {"HOST_FALLBACK": "NO"}).create_infer_request()
        host = Core().compile_model(model, "CPU.HOST").create_infer_request()
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for place in places(y):
            zero = y.copy()
            zero.reshape(-1)[place] = 0
            wrong = feeds([x, zero])
            assert message(request, wrong) == message(host, wrong) == f"node 'the_node' ({lookup.op}): {lookup.says}"
            with pytest.raises(Exception, match="by zero"):
                session.run(None, wrong)
        legal = feeds([x, y])
        (got,), (want,) = request.infer(legal).values(), session.run(None, legal)
        assert (got == want).all()


@pytest.mark.parametrize("device", ["CPU", OPENCL])
def test_one_hot_leaves_out_what_is_out_of_range(device: str) -> None:
    """ONNX says so."""
    for dtype in (np.int32, np.int64, np.float32):
        far = (7, -8, 2**31 - 1, *(FAR if dtype is np.int64 else ()))
        at = np.array([0, 6, -1, -7, *far]).astype(dtype)
        lookup = Lookup("OneHot", [at, np.array(7), np.array([2, 5], np.float32)], 0, 0, 0, "")
        model = lookup.model(dtype)
        depth = onnx.numpy_helper.from_array(np.array(7), "i1")
        model.graph.initializer.append(depth)
        model.graph.input.remove(model.graph.input[1])
        request = Core().compile_model(model, device, {"HOST_FALLBACK": "NO"}).create_infer_request()
        (got,) = request.infer({"i0": at, "i2": np.array([2, 5], np.float32)}).values()
        assert (got.argmax(1)[:4] == [0, 6, 6, 0]).all() and (got[:4] == 5).sum() == 4 and (got[4:] == 2).all()


@pytest.mark.parametrize("device", ["CPU", OPENCL])
@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("Gather", [X, np.zeros((0, 3), np.int64)]),
        ("Gather", [X[:0], np.zeros(0, np.int64)]),
        ("GatherElements", [X, np.zeros((0, 5), np.int64)]),
        ("GatherND", [X, np.zeros((0, 1), np.int64)]),
        ("ScatterElements", [X, np.zeros((0, 5), np.int64), X[:0]]),
        ("ScatterND", [X, np.zeros((0, 1), np.int64), X[:0]]),
        ("Div", [np.zeros((0, 3), np.int32), np.ones(3, np.int32)]),
    ],
)
def test_nothing_to_look_up(op: str, inputs: list[np.ndarray], device: str) -> None:
    model = Lookup(op, inputs, 1, 0, 0, "").model(inputs[1].dtype)
    (got,) = Core().compile_model(model, device).create_infer_request().infer(feeds(inputs)).values()
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, feeds(inputs))
    assert got.shape == want.shape and (got == want).all()


@pytest.mark.parametrize("device", ["CPU", OPENCL])
def test_all_is_wrong(rng: np.random.Generator, device: str) -> None:
    """Whoever comes first fills in the record, and nobody else writes to it."""
    x, at = floats(rng, 7, 5, 3), np.zeros((50000, 2), np.int64)
    at[:, 0], at[:, 1] = np.arange(50000) + 100, -np.arange(50000) - 60000
    model = Lookup("GatherND", [x, at], 1, 0, 0, "").model(np.int64)
    request = Core().compile_model(model, device, {"HOST_FALLBACK": "NO"}).create_infer_request()
    for _ in range(20):
        said = message(request, feeds([x, at])).partition("out of range: ")[2].split()
        value, size = int(said[0]), int(said[-1])
        assert (size == 7 and 100 <= value < 50100) or (size == 5 and -110000 < value <= -60000)


@pytest.mark.parametrize("device", ["CPU", OPENCL])
def test_a_box_that_is_too_large(rng: np.random.Generator, device: str) -> None:
    given = [floats(rng, 2, 3, 9, 9), np.array([[0, 0, 3, 3], [0, 0, 1e6, 1e6]], np.float32), np.array([0, 1])]
    lookup = Lookup("RoiAlign", given, 2, 0, 0, "", attrs={"output_height": 2, "output_width": 2})
    request = Core().compile_model(lookup.model(np.int64), device, {"HOST_FALLBACK": "NO"}).create_infer_request()
    host = Core().compile_model(lookup.model(np.int64), "CPU.HOST").create_infer_request()
    said = "node 'the_node' (RoiAlign): box 1 has more than 67108864 sample points"
    assert message(request, feeds(given)) == message(host, feeds(given)) == said
    small = feeds([given[0], np.minimum(given[1], 5), given[2]])
    np.testing.assert_allclose(request.infer(small)["o0"], host.infer(small)["o0"], rtol=1e-4)
