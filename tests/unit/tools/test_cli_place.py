"""`tunewright place`, and the other commands with devices of HETERO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tunewright.tools import execute

BOTH = "HETERO:CPU,CPU.HOST"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "kb"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy")
    edges = (("Relu", "x", "a"), ("Tanh", "a", "b"), ("Neg", "b", "y"))
    nodes = [helper.make_node(op, [a], [b], name=op.lower()) for op, a, b in edges]
    proto = helper.make_model(
        helper.make_graph(nodes, "test", [x], [y]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> str:
    assert execute([str(a) for a in arguments]) == code
    told = capsys.readouterr()
    return told.err if code else told.out


def test_edit_the_placement(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Write it down, change a node, and use it."""
    text = run(capsys, "place", file, "-d", BOTH, "-s", "n=2", "--save", "nodes.json")
    assert "1 subgraph; placed by priorities" in text
    nodes = json.loads(Path("nodes.json").read_text())
    assert nodes == {"relu": "CPU", "tanh": "CPU", "neg": "CPU"}
    Path("nodes.json").write_text(json.dumps(nodes | {"tanh": "CPU.HOST"}))
    given = ("-d", BOTH, "-c", "HETERO_AFFINITY=nodes.json")
    found = json.loads(run(capsys, "place", file, *given, "-s", "n=2", "--json"))
    assert [(s["device"], s["nodes"]) for s in found["subgraphs"]] == [
        ("CPU", ["relu"]), ("CPU.HOST", ["tanh"]), ("CPU", ["neg"])
    ]  # fmt: skip
    assert found["placement"] == "hand"
    text = run(capsys, "query", file, *given)
    assert "3 nodes: 2 on CPU, 1 on CPU.HOST, 0 on the host" in text
    np.save("x.npy", np.ones((2, 4), np.float32))
    run(capsys, "run", file, *given, "-i", "x=x.npy", "-o", "out")
    np.testing.assert_allclose(np.load("out/y.npy"), -np.tanh(np.ones((2, 4))), rtol=1e-6)


def test_measure(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "place", file, "-d", BOTH, "-s", "n=2", "--measure", "0.01")
    assert "all on CPU" in text and "kept" in text and "placed by measurement" in text
    found = json.loads(run(capsys, "place", file, "-d", BOTH, "-s", "n=2", "--measure", "0.01", "--json"))
    assert {row["placement"] for row in found["measured"]} >= {"all on CPU", "all on CPU.HOST"}
    assert Path(found["file"]).is_file()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("-d", "CPU"), "CPU is not a HETERO device"),
        (("-d", "CPU", "--measure", "1"), "no nodes to place"),
        (("-d", "HETERO"), "names no devices"),
        (("-d", BOTH, "--measure", "0"), "not a number of seconds above 0"),
        (("-d", BOTH, "-c", "HETERO_AFFINITY=none.json"), "none.json: cannot be read"),
        (("-d", BOTH, "--save", "none/nodes.json"), "there is no folder none"),
    ],
)
def test_mistakes(file: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str) -> None:
    assert text in run(capsys, "place", file, *arguments, code=2)


def test_benchmark(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("nodes.csv").write_text("tanh,CPU.HOST\n")
    text = run(capsys, "benchmark", file, "-d", BOTH, "-c", "HETERO_AFFINITY=nodes.csv", "-n", "3", "--pc")
    assert "3 inferences" in text and "tanh" in text
