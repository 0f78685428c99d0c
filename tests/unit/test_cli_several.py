"""MULTI, AUTO and BATCH from the command line."""

import json

import onnx
import pytest
from onnx import parser

from tunewright import tools

NETWORK = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1, 8] x) => (float[1, 8] y)
{
    a = Relu(x)
    y = Add(a, x)
}
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    onnx.save(parser.parse_model(NETWORK), tmp_path / "m.onnx")
    return str(tmp_path / "m.onnx")


@pytest.mark.parametrize("device", ["MULTI:CPU,CPU.HOST(2)", "AUTO", "AUTO:CPU.HOST,CPU", "BATCH:CPU.HOST(4)"])
def test_run(device, model, capsys):
    assert tools.execute(["run", model, "--device", device, "--no-save"]) == 0
    assert "float32[1,8]" in capsys.readouterr().out


def test_benchmark_tells_who_served(model, capsys):
    assert tools.execute(["benchmark", model, "-n", "30", "-d", "MULTI:CPU,CPU.HOST"]) == 0
    assert "served by: CPU " in capsys.readouterr().out
    assert tools.execute(["benchmark", model, "-n", "30", "-d", "AUTO:CPU.HOST"]) == 0
    assert "served by: CPU.HOST\n" in capsys.readouterr().out
    assert tools.execute(["benchmark", model, "-n", "30", "-d", "AUTO:CPU.HOST,CPU", "--pc", "--report", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"] == ["CPU.HOST"] and report["served"]["CPU"] == 0 and report["served"]["CPU.HOST"] >= 30
    assert tools.execute(["benchmark", model, "-n", "30", "-d", "CPU.HOST"]) == 0
    assert "served by" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("MULTI:", "MULTI: no device is named (name one, or more: MULTI:GPU.0 for example)"),
        ("MULTI:CPU,cpu", "MULTI: cpu is the same device as CPU (name each device once)"),
        ("MULTI:AUTO", "MULTI: AUTO is several devices itself"),
        ("AUTO:NOWHERE", "there is no device 'NOWHERE'"),
        ("BATCH:CPU(1)", "one example is no batch"),
    ],
)
@pytest.mark.parametrize("command", ["run", "benchmark"])
def test_wrong_names(command, device, said, model, capsys):
    assert tools.execute([command, model, "-d", device]) == 2
    assert said in capsys.readouterr().err


def test_other_commands_want_one_device(model, capsys):
    assert tools.execute(["query", model, "-d", "MULTI:CPU,CPU.HOST"]) == 0
    assert tools.execute(["lock", model, "-d", "MULTI:CPU,CPU.HOST"]) == 2
    assert tools.execute(["tune", model, "-d", "MULTI:CPU,CPU.HOST", "--budget", "1"]) == 2
    assert "each device is tuned by itself" in capsys.readouterr().err
