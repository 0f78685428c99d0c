"""Weights of networks with open shapes: packed in memory, and as they were only in the model's file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunewright import Core
from tunewright.errors import ModelError
from tunewright.frontend import weight_reader
from tunewright.frontend.onnx import load
from tunewright.ir.stored_weights import stored
from tunewright.ir.weight_memory import LARGE
from tunewright.runtime.requests.request import DeviceModel
from tunewright.settings import Settings

#: draws the tables of this module, once, when it is imported; tests draw from their own (the fixture rng)
TABLES = np.random.default_rng(23)
SEED = 1023
SIZE = 192
#: kernels one by one: other tests compile these, too
CONFIG = {"JOIN_LAUNCHES": "NO"}
WEIGHTS = {f"w{i}": (TABLES.standard_normal((SIZE, SIZE)) / 14).astype(np.float32) for i in range(2)}
TABLE = TABLES.standard_normal((SIZE, SIZE)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows of a table, two products behind them."""
    monkeypatch.setattr(weight_reader, "SMALL_FILE", 0)
    nodes = [
        helper.make_node("Gather", ["table", "i"], ["x"]),
        helper.make_node("MatMul", ["x", "w0"], ["g"]),
        helper.make_node("Relu", ["g"], ["h"]),
        helper.make_node("MatMul", ["h", "w1"], ["y"]),
    ]
    given = helper.make_tensor_value_info("i", TensorProto.INT64, ["n"])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", SIZE])
    kept = [numpy_helper.from_array(array, name) for name, array in (*WEIGHTS.items(), ("table", TABLE))]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [given], [made], kept)), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def check(rng: np.random.Generator, compiled: DeviceModel, rows: int) -> None:
    i = rng.integers(0, SIZE, rows)
    want = np.maximum(TABLE[i].astype(np.float64) @ WEIGHTS["w0"], 0) @ WEIGHTS["w1"]
    np.testing.assert_allclose(compiled({"i": i})["y"], want, rtol=1e-4, atol=1e-4)


def test_weights_are_packed_once_for_all_shapes(rng: np.random.Generator, path: Path) -> None:
    compiled = Core(CONFIG).compile_model(path, "CPU")
    check(rng, compiled, 24)
    weight = 4 * SIZE * SIZE
    held = compiled.memory_statistics()["constants"]
    assert 3 * weight <= held < 3.5 * weight, "two as products want them, and the table as it is"
    for rows in (48, 72, 24):
        check(rng, compiled, rows)
    assert compiled.memory_statistics()["constants"] < 3.5 * weight
    assert not any(any(v.const.strides) for v in compiled.graph.constants() if v.const.nbytes >= LARGE)


def test_the_file_may_go(rng: np.random.Generator, path: Path) -> None:
    compiled = Core(CONFIG).compile_model(path, "CPU")
    check(rng, compiled, 24)
    path.unlink()
    check(rng, compiled, 48)


def test_a_file_that_was_written_again(rng: np.random.Generator, path: Path) -> None:
    core = Core(CONFIG)
    model = core.read_model(path)
    mine, held = core.compile_model(path, "CPU"), core.compile_model(model, "CPU")
    for compiled in (mine, held):
        check(rng, compiled, 24)
    with path.open("r+b") as file:  # as whoever exports a model does it, into the same file
        file.write(bytes(path.stat().st_size))
    os.utime(path, ns=(0, 0))
    refused = []
    for _ in range(2):  # whatever holds what was raised first
        with pytest.raises(ModelError, match="cannot be read from the model's file again: it has changed") as raised:
            check(rng, mine, 1)  # one row is not of the class that the first plan is for
        refused.append(raised)
    check(rng, mine, 24)
    check(rng, held, 1)  # its weights are in memory, since the model is


def test_views_are_told_apart(path: Path) -> None:
    graph = load(path, Settings()).graph
    table = next(v.const for v in graph.constants() if v.name == "table")
    views = [table, table.T, table[1:], table.reshape(-1), table.view(np.int32)]
    found = [stored(view) for view in views]
    assert len(set(found)) == len(views) and stored(table) == found[0]
    for view, one in zip(views, found, strict=True):
        assert one is not None
        np.testing.assert_array_equal(one.array(), view)
        assert np.shares_memory(one.array(), table), "what is in memory is not read again"
    assert stored(table.copy()) is None and stored(table + 1) is None
