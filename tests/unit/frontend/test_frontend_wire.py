"""Files whose large tensors are read apart from the rest: the same model, or the same refusal, as from their bytes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunewright.errors import ModelError, TunewrightError
from tunewright.frontend import weight_reader
from tunewright.frontend.onnx import load
from tunewright.ir.graph_text import to_text
from tunewright.settings import Settings


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has 16 bytes is large, and read in several pieces."""
    monkeypatch.setattr(weight_reader, "SMALL_FILE", 0)
    monkeypatch.setattr(weight_reader, "SMALL", 16)
    monkeypatch.setattr(weight_reader, "CHUNK", 1000)


def tensors() -> list[TensorProto]:
    """Every way to hold elements, large and small."""
    rng = np.random.default_rng(5)
    arrays = {
        "w": rng.standard_normal((8, 40)).astype(np.float32), "h": rng.standard_normal((40, 8)).astype(np.float16),
        "i": np.arange(40, dtype=np.int64), "b": rng.random(100) < 0.5, "s": np.array([3.0], np.float32),
    }  # fmt: skip
    made = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    typed = helper.make_tensor("t", TensorProto.FLOAT, [20], range(20))
    return [*made[:2], typed, *made[2:]]


def model(given: list[TensorProto] | None = None) -> onnx.ModelProto:
    given = tensors() if given is None else given
    nodes = [helper.make_node("Identity", [t.name], [f"{t.name}_out"], t.name * 30) for t in given]
    nodes += [helper.make_node("Constant", [], [f"{t.name}_node_out"], value=t) for t in given[:3]]
    made = [(node.output[0], tensor) for node, tensor in zip(nodes, [*given, *given], strict=False)]
    outputs = [helper.make_tensor_value_info(name, t.data_type, list(t.dims)) for name, t in made]
    graph = helper.make_graph(nodes, "g", [], outputs, given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def constants(path: Path) -> dict[str, np.ndarray]:
    return {v.name: v.const for v in load(path, Settings()).graph.constants() if v.const is not None}


def test_tensors_are_those_of_the_file(tmp_path: Path) -> None:
    made, path = model(), tmp_path / "m.onnx"
    onnx.save(made, path)
    held = {t.name: t for t in made.graph.initializer}
    held |= {node.output[0]: node.attribute[0].t for node in made.graph.node if node.op_type == "Constant"}
    found = constants(path)
    assert list(found) == list(held)
    for name, tensor in held.items():
        wanted = numpy_helper.to_array(tensor)
        assert found[name].dtype == wanted.dtype and found[name].shape == wanted.shape
        assert found[name].tobytes() == wanted.tobytes() and not found[name].flags.writeable


def test_protobuf_parses_what_is_small_alone(tmp_path: Path) -> None:
    made, path = model(), tmp_path / "m.onnx"
    onnx.save(made, path)
    with path.open("rb") as file:
        parts = weight_reader.read(file, path.stat().st_size)
    assert sorted(raw.nbytes for raw in parts.large.values()) == [100, 320, 640, 640, 1280, 1280]
    left = onnx.ModelProto.FromString(parts.small)
    assert [t.HasField("raw_data") for t in left.graph.initializer] == [False, False, False, False, False, True]
    for tensor, raw in parts.tensors(left).values():
        tensor.raw_data = raw.tobytes()
    assert left == made


def test_bodies_have_tensors_of_their_own(tmp_path: Path) -> None:
    """An initializer of a body stands at the same place as a large one of the graph."""
    inner = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["y"])], "body", [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8])],
        [numpy_helper.from_array(np.arange(8, dtype=np.float32), "c")],
    )  # fmt: skip
    made = model()
    made.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=inner, else_branch=inner))
    made.graph.input.append(helper.make_tensor_value_info("x", TensorProto.BOOL, []))
    made.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [8]))
    path = tmp_path / "m.onnx"
    onnx.save(made, path)
    mine, other = load(path, Settings()).graph, load(made, Settings()).graph
    assert to_text(mine) == to_text(other)


def field(number: int, content: bytes) -> bytes:
    return weight_reader._whole(number, content)


def with_list(count: int) -> bytes:
    made = model()
    made.graph.node.append(helper.make_node("Constant", [], ["list"], value_ints=range(count)))
    made.graph.output.append(helper.make_tensor_value_info("list", TensorProto.INT64, [count]))
    return made.SerializeToString()


ODD = {
    "two graphs": lambda data: data + field(7, field(5, model().graph.initializer[0].SerializeToString())),
    "raw_data twice": lambda data: field(8, b"") + field(
        7, field(5, field(9, bytes(64)) + model().graph.initializer[0].SerializeToString())
    ) + model([]).SerializeToString(),
    "a long list": lambda data: with_list(2 * weight_reader.MOST),
    "a group": lambda data: data + b"\x0b\x0c",
    "a number without end": lambda data: data + b"\xff" * 11,
    "a field 0": lambda data: data + b"\x02\x00",
    "a length beyond the end": lambda data: data + b"\x3a\x7f",
    "the end inside a tensor": lambda data: data[: data.index(b"w" * 30)],
    "an unknown field": lambda data: data + field(200, bytes(100)) + b"\xc9\x0c" + bytes(8) + b"\xcd\x0c" + bytes(4),
}  # fmt: skip


def outcome(source: Path | bytes) -> object:
    try:
        graph = load(source, Settings()).graph
        return to_text(graph), [v.const.tobytes() for v in graph.constants() if v.const is not None]
    except TunewrightError as error:
        return type(error), error.what


@pytest.mark.parametrize("name", ODD)
def test_odd_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(ODD[name](model().SerializeToString()))
    assert outcome(path) == outcome(path.read_bytes())


def test_damaged_files(tmp_path: Path) -> None:
    rng, whole, path = random.Random(7), model().SerializeToString(), tmp_path / "m.onnx"
    kinds = set()
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.choice((len(data), len(data), rng.randrange(1, len(data))))])
        mine = outcome(path)
        kinds.add(mine[0] if isinstance(mine, tuple) and isinstance(mine[0], type) else None)
        assert mine == outcome(path.read_bytes())
    assert {None, ModelError} <= kinds


def test_a_file_that_became_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(model(), path)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: real(fd, to, at) if at < 500 else 0)
    with pytest.raises(ModelError, match="cannot be read: the file has become shorter"):
        load(path, Settings())
