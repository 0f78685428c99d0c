"""`tunewright driver`: solvers of one problem side by side, many commands; and the whole way of offline tuning."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tunewright import Core, tools
from tunewright.knowledge.open_databases import open_user
from tunewright.plugins.single import open_device
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tools.driver import SCHEMA
from tunewright.tuning import session
from tunewright.tuning.offline import dump
from tunewright.tuning.offline.command import from_line
from tunewright.tuning.offline.command_form import CLASSES
from tunewright.tuning.offline.suggested_commands import driver
from tunewright.tuning.tuner import Origin, Tuner

opencl = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")
MATMUL = ["matmul", "--a", "float32[64,256]", "--b", "float32[256,128]!", "--epilogue", "Relu"]
FAULTY = Path(__file__).parents[2] / "faults" / "faulty"


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("TUNEWRIGHT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "user"))
    monkeypatch.setenv("TUNEWRIGHT_SYSTEM_DB_PATH", str(tmp_path / "system"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def drive(capsys):
    """(exit code, stdout, stderr) of a command of the driver."""

    def run(*arguments):
        code = tools.execute(["driver", *(str(a) for a in arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def results(drive):
    """(exit code, results by problem's operation) of a command that prints JSON."""

    def run(*arguments):
        code, out, err = drive(*arguments, "--json")
        assert code < 2, err
        report = json.loads(out)
        assert report["schema"] == SCHEMA
        return code, {r["problem"].partition("(")[0]: r for r in report["results"]}

    return run


def everyone(problem: Problem, device: str) -> set[str]:
    """The solvers that have a say in a problem on a device."""
    accepting, rejected = Tuner(Settings()).ask(problem, open_device(device))
    return {s.id for s in accepting} | set(rejected)


# ---- one problem ---------------------------------------------------------------------------------------------------


@opencl
def test_every_solver_is_timed_or_says_why_not(results, tmp_path):
    code, found = results(*MATMUL)
    row = found["MatMul"]
    problem = from_line(row["command"])
    assert code == 0 and problem.key() == row["problem"]
    kernels = {k["solver"]: k for k in row["kernels"]}
    assert len(kernels) == len(row["kernels"]) and not kernels.keys() & row["refused"].keys()
    assert kernels.keys() | row["refused"].keys() == everyone(problem, "CPU")
    assert all(row["refused"].values())
    assert row["work"]["flops"] >= 2 * 64 * 256 * 128 and row["regime"]["kind"] == "layer"
    assert row["chosen"] == {"solver": row["default"], "config": kernels[row["default"]]["config"], "origin": "default"}
    for kernel in kernels.values():
        assert kernel["status"] == "OK" and kernel["why"] is None
        seconds = kernel["seconds"]
        assert 0 < seconds["lower"] <= seconds["median"] <= seconds["upper"] < 1
        assert kernel["error"] < 1e-5
        if not kernel["probed"]:
            assert kernel["samples"] == row["rounds"] >= 7 and kernel["speed"]["median"] > 0
    assert kernels[row["default"]]["speed"]["median"] == 1
    medians = [k["seconds"]["median"] for k in row["kernels"]]
    assert medians == sorted(medians), "the fastest stands first"
    assert not (tmp_path / "user").exists(), "without --tune nothing is written"


@opencl
def test_the_table(drive):
    code, out, err = drive(*MATMUL, "--warm")
    assert (code, err) == (0, "")
    assert out.startswith("MatMul(float32[64,256], float32[256,128]!) -> float32[64,128] | Relu(-1)\nCPU; 4.")
    assert "; warm, " in out and " in 1 copy; " in out
    header = next(line for line in out.splitlines() if line.startswith("solver"))
    assert header.split() == ["solver", "ms", "quartiles", "speed", "GFLOP/s", "GB/s", "error"]
    assert max(map(len, out.splitlines()[2:8])) <= 80
    assert "\ndefault: opencl." in out and "host.reference" in out and " refuses: " in out


def test_other_devices(results):
    """On the host there is one solver; the Null device computes nothing, and that is found out."""
    code, found = results("softmax", "--input", "float32[8,64]", "-d", "CPU.HOST")
    assert code == 0 and [k["solver"] for k in found["Softmax"]["kernels"]] == ["host.reference"]
    code, found = results("softmax", "--input", "float32[8,64]", "-d", "NULL")
    statuses = {k["solver"]: k["status"] for k in found["Softmax"]["kernels"]}
    assert code == 1 and statuses == {"null.any": "WRONG"}


def test_a_kernel_that_is_wrong_is_told(tmp_path):
    """An extension, installed for a process of its own: its kernel is off by a percent, and another one crashes."""
    (tmp_path / "broken.py").write_text(
        "from faulty import FaultyHost, FaultyC\n"
        "class Percent(FaultyC):\n"
        "    family = 'percent'\n"
        "    def default(self, problem, target):\n"
        "        return {'how': 'percent', 'pace': 1}\n"
        "class Crash(FaultyC):\n"
        "    family = 'crash'\n"
        "    def default(self, problem, target):\n"
        "        return {'how': 'crash', 'pace': 1}\n"
        "SOLVERS = (Percent(), Crash())\n"
    )
    about = tmp_path / "broken-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[tunewright.solvers]\nbroken = broken\n")
    path = os.pathsep.join([str(tmp_path), str(FAULTY), *filter(None, sys.path)])
    command = [sys.executable, "-m", "tunewright", "driver", "elementwise", "--op", "Relu", "--input", "float32[64,64]"]
    device = "CPU" if open_device("CPU").family != "host" else pytest.skip("needs a CPU device with kernels")
    done = subprocess.run(
        [*command, "-d", device], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "opencl.percent.shape: wrong: " in done.stdout and "opencl.crash.shape: crashed: " in done.stdout
    assert "opencl.elementwise " in done.stdout


MISTAKES = [
    (["conv", "--input", "float3[1,2]"], ["float3 is no element type", "like float32[1,64,56,56]@blocked8"]),
    (["conv", "--strid", "1"], ["did you mean --strides?"]),
    (["elementwise", "--op", "Rellu", "--input", "float32[1]"], ["no operation Rellu", "did you mean Relu?"]),
    (["softmax", "--input", "float32[4]", "-d", "TPU"], ["no device 'TPU'"]),
    (["bogus"], ["No such command 'bogus'"]),
    (["-d", "NULL", "conv", "--input", "float32[1]"], ["the options must follow the sub-command conv"]),
    (["--commands", "x", "conv"], ["--commands", "cannot be combined with the sub-command conv"]),
    (["--commands", "nowhere.txt"], ["nowhere.txt", "No such file"]),
    (["softmax", "--input", "float32[4]", "--tune", "-c", "AUTO_TUNE_MODE=NO_TUNE", "-d", "NULL"], ["tunes nothing"]),
    (["op", "--op", "StringNormalizer", "--input", "string[3]", "--output", "string[3]", "-d", "CPU.HOST"],
     ["cannot be measured", "strings"]),
    (["softmax", "--input", "float32[4]", "-c", "BOGUS=1"], ["unknown setting BOGUS"]),
    (["conv", "--input", "float32[1,8]"], ["Conv", "input 1 is missing"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "texts"), MISTAKES, ids=lambda v: " ".join(v)[:40])
def test_a_mistake_is_one_line(drive, arguments, texts):
    code, out, err = drive(*arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("tunewright: ")
    assert all(text in err for text in texts), err


@opencl
def test_no_solver_takes_it(drive):
    code, _, err = drive("op", "--op", "Det", "--input", "float32[3,3]", "-c", "HOST_FALLBACK=NO")
    assert code == 2 and "no solver for Det on CPU: host.reference: HOST_FALLBACK is NO" in err


def test_help_of_every_class(drive):
    _, whole, _ = drive("--help")
    assert "Example: tunewright driver" in whole
    for title in CLASSES:
        code, out, err = drive(title)
        assert (code, err) == (0, "") and f"Example: tunewright driver {title}" in " ".join(out.split())
        assert title in whole
        own = drive(title, "--help")[1]
        assert max(map(len, own.splitlines())) <= 80
    assert "Conv takes --input, --weights, --bias, " in drive("conv")[1]


# ---- many commands -------------------------------------------------------------------------------------------------

LOG = """\
some application says hello
INFO:tunewright.commands:tunewright driver softmax --input 'float32[8,64]'
tunewright driver softmax --input 'float32[8,64]'
# tunewright driver softmax --input 'float32[9,64]'

tunewright driver elementwise --op Relu --input 'float32[8,64]'
"""


def test_commands_of_a_file_and_of_stdin(results, drive, tmp_path, monkeypatch):
    (tmp_path / "log.txt").write_text(LOG)
    code, found = results("--commands", "log.txt", "-d", "CPU.HOST")
    assert code == 0 and set(found) == {"Softmax", "Relu"}, "each once"
    monkeypatch.setattr(sys, "stdin", io.StringIO(LOG))
    assert set(results("--commands", "-", "-d", "CPU.HOST")[1]) == {"Softmax", "Relu"}
    (tmp_path / "log.txt").write_text("hello\n")
    code, _, err = drive("--commands", "log.txt", "-d", "CPU.HOST")
    assert code == 2 and "holds no command" in err and "ENABLE_LOGGING_CMD" in err


def test_a_wrong_command_does_not_stop_the_others(drive, tmp_path):
    texts = "op --op StringNormalizer --input 'string[3]' --output 'string[3]'"
    (tmp_path / "log.txt").write_text(f"tunewright driver conv --bogus 1\ntunewright driver {texts}\n{LOG}")
    code, out, err = drive("--commands", "log.txt", "-d", "CPU.HOST", "--json")
    assert code == 1
    assert "log.txt, line 1: Conv has no option --bogus" in err and "strings are not measured" in err
    found = json.loads(out)["results"]
    assert ["error" in row for row in found] == [True, False, False]


# ---- offline tuning, the whole way ---------------------------------------------------------------------------------


def model() -> onnx.ModelProto:
    """One layer, whose default is slower than other candidates by more than noise makes."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 32, 64, 64]) for name in "xy")
    node = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1])
    graph = helper.make_graph([node], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def steps(compiled):
    compiled({"x": np.ones((1, 32, 64, 64), np.float32)})
    return [s for plan in compiled.program.plans for s in plan.steps if s.choice is not None]


def answered(folder: Path) -> bool:
    """Every problem of the model has an answer in a knowledge base: noise did not leave it open."""
    found = steps(Core({"USER_DB_PATH": str(folder)}).compile_model(model()))
    return all(s.choice.origin is Origin.USER for s in found)


@opencl
def test_dump_then_tune_elsewhere_then_merge_then_use(results, tmp_path, monkeypatch, capsys):
    """Document 002's second method of exhaustive tuning, and document 004's offline tuning."""
    onnx.save(model(), tmp_path / "model.onnx")
    wishes = {"ENABLE_LOGGING_CMD": "1", "ENABLE_TUNE_DUMP": "True", "TUNE_DUMP_PATH": "d"}
    variables = {**os.environ, **{f"TUNEWRIGHT_{name}": value for name, value in wishes.items()}}
    command = [sys.executable, "-m", "tunewright", "run", "model.onnx"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    (tmp_path / "log.txt").write_text(done.stderr)

    dumped, reasons = dump.read("d")
    logged = [p for line in done.stderr.splitlines() if (p := from_line(line)) is not None]
    planned = {Problem.of(s.node) for s in steps(Core().compile_model(model()))}
    assert not reasons and set(dumped) == set(logged) == planned and len(logged) == len(planned) == 1
    commands = [line for line in done.stderr.splitlines() if line.startswith("tunewright")]
    assert commands == [driver(p, "CPU", Settings.from_environment()) for p in logged]
    assert all(f" -d CPU -c USER_DB_PATH={tmp_path / 'user'}" in line for line in commands)

    for seconds in (3, 6, 12, 24):  # the machine may be busy
        code, found = results("--commands", "log.txt", "--tune", "--seconds", seconds)
        (row,) = found.values()
        assert code == 0 and row["problem"] == logged[0].key() and row["tuned"]["records"]
        if row["tuned"]["attempted"] > 1 and answered(tmp_path / "user"):
            break
    assert row["tuned"]["attempted"] > 1
    here = {s.node.op: s.choice for s in steps(Core().compile_model(model()))}
    for op, row in results("--commands", "log.txt")[1].items():
        chosen = row["chosen"]
        assert (chosen["solver"], chosen["config"]) == (here[op].solver.id, dict(here[op].config))
        assert chosen["origin"] == "user knowledge base"

    assert tools.execute(["kb", "export", "tuned.jsonl"]) == 0
    there = tmp_path / "there"
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(there))
    assert not answered(there)
    assert tools.execute(["kb", "import", "tuned.jsonl"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(session, "tune", lambda *_, **__: pytest.fail("nothing is searched"))
    core = Core()
    core.set_tuning_policy(mode="TUNING_CREATE")  # what is missing would be tuned: nothing is
    used = {s.node.op: s.choice for s in steps(core.compile_model(model()))}
    assert used.keys() == here.keys()
    for op, choice in used.items():
        assert choice.origin is Origin.USER
        assert (choice.solver, choice.config) == (here[op].solver, here[op].config)
    assert [e.action for e in open_user(core.settings).events()] == ["imported"]
