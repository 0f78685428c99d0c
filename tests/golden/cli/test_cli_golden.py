"""What the commands print, to the letter, at 80 columns. ``ACCEPT=1`` writes the files anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunewright import tools

FOLDER = Path(__file__).parent
CASES = {
    "run": ["run", "model.onnx", "--input", "x=2", "--no-save"],
    "run_saved": ["run", "model.onnx", "--input", "x=2", "--shape", "x=1x2x4x4"],
    "compare": ["compare", "model.onnx", "--input", "x=2", "--shape", "4x2x4x4", "--layers", "--against", "reference"],
    "graph_read": ["graph", "model.onnx", "--stage", "read"],
    "graph_optimized": ["graph", "model.onnx"],
    "graph_executed": ["graph", "model.onnx", "--stage", "executed", "--shape", "n=3", "--device", "CPU.HOST"],
    "query": ["query", "model.onnx"],
    "graph_dot": ["graph", "model.onnx", "--format", "dot"],
    "graph_why": ["graph", "model.onnx", "--why"],
    "no_file": ["run", "absent.onnx"],
    "no_input": ["run", "model.onnx", "--input", "z=1"],
    "bad_shape": ["run", "model.onnx", "--shape", "x=1x2"],
    "bad_device": ["run", "model.onnx", "--device", "TPU"],
    "bad_setting": ["run", "model.onnx", "--config", "PREF_COUNT=YES"],
}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A small network whose values are small whole numbers: every engine computes the same bits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    w = (np.arange(36) % 3 - 1).astype(np.float32).reshape(2, 2, 3, 3)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Add", ["r", "x"], ["s"], name="residual"),
        helper.make_node("Flatten", ["s"], ["y"], name="flatten"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])],
        [numpy_helper.from_array(w, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "model.onnx")


@pytest.mark.parametrize("case", CASES)
def test_output(case, model, capsys):
    code = tools.execute(CASES[case])
    captured = capsys.readouterr()
    lines = [
        f"$ tunewright {' '.join(CASES[case])}",
        *captured.out.splitlines(),
        *captured.err.splitlines(),
        f"exit code {code}",
    ]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    text = re.sub(r"; not usable here: .*\)", ")", text)  # and what this one lacks
    text = re.sub(r", (?:CPU\.(?!HOST|NATIVE)|GPU)[\w.]*", "", text)  # devices that not every machine has
    file = FOLDER / f"{case}.txt"
    if os.environ.get("ACCEPT"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "run with ACCEPT=1 if the change is meant"


@pytest.mark.parametrize("case", ["run_saved", "graph_executed"])
def test_the_page_shows_what_is_printed(case):
    page = FOLDER.parents[2] / "docs" / "cli.md"
    text = (FOLDER / f"{case}.txt").read_text(encoding="utf-8").rpartition("exit code")[0]
    assert text in page.read_text(encoding="utf-8")
