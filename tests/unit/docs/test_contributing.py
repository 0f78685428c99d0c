"""The examples in CONTRIBUTING.md are true: one file each, added from outside of the package through entry points."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GROUPS = {"ops": "OPS", "solvers": "SOLVERS", "strategies": "STRATEGIES", "devices": "DEVICES", "commands": "COMMANDS"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A distribution with the examples as its modules, as pip would have installed it."""
    folder = tmp_path_factory.mktemp("site")
    package = folder / "tunewright_example"
    package.mkdir()
    (package / "__init__.py").touch()
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    lines = []
    for group, attribute in GROUPS.items():
        (block,) = [b for b in blocks if re.search(rf"^{attribute} = ", b, re.M)]
        (package / f"{group}.py").write_text(block, encoding="utf-8")
        lines.append(f"[tunewright.{group}]\nexample = tunewright_example.{group}\n")
    assert len(blocks) == len(GROUPS)
    info = folder / "tunewright_example-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tunewright-example\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def python(site, *arguments):
    path = os.pathsep.join([str(site), str(ROOT / "src")])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120)


USE = """
import numpy as np
from onnx import TensorProto, helper
from tunewright import Core

info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in "xy"]
node = helper.make_node("Cube", ["x"], ["y"], domain="example", name="cube")
graph = helper.make_graph([node], "g", info[:1], info[1:])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("example", 1)])
core = Core({"PERF_COUNT": "YES"})
assert core.available_devices == ["CPU", "SIMULATED"], core.available_devices
request = core.compile_model(model, "SIMULATED").create_infer_request()
assert request.infer({"x": np.asarray([1, -2, 3], np.float32)})["y"].tolist() == [1, -8, 27]
(row,) = request.get_profiling_info()
assert row.kernel == "example.cube", row
"""


def test_op_solver_and_device(site):
    done = python(site, "-c", USE)
    assert done.returncode == 0, done.stderr


def test_strategy(site):
    script = """
import numpy as np
from tunewright import discovery
from tunewright.search.base import Trial
from tunewright.search.space import Space

found = discovery.find("tunewright.strategies", key=lambda s: s.name)
space = Space({"a": (1, 2, 4, 8), "b": (1, 2, 3)})
strategy = found["example-climb"](space, np.random.default_rng(0))
asked = []
while configs := strategy.ask(1):
    strategy.tell([Trial(c, seconds=1 + abs(c["a"] - 4) + c["b"]) for c in configs])
    asked += configs
assert len(asked) == 12 and dict(space.config(strategy.best)) == {"a": 4, "b": 1}
"""
    done = python(site, "-c", script)
    assert done.returncode == 0, done.stderr


def test_sub_command(site):
    assert "greet" in python(site, "-m", "tunewright", "--help").stdout
    assert python(site, "-m", "tunewright", "greet", "--name", "you").stdout == "hello, you\n"
    assert "SIMULATED" in python(site, "-m", "tunewright", "devices").stdout


def test_a_name_taken_twice_is_named(site, tmp_path):
    twin = tmp_path / "twin.py"
    twin.write_text((site / "tunewright_example" / "commands.py").read_text(encoding="utf-8"), encoding="utf-8")
    info = tmp_path / "twin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: twin\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[tunewright.commands]\ntwin = twin\n", encoding="utf-8")
    done = python(f"{site}{os.pathsep}{tmp_path}", "-m", "tunewright", "--help")
    assert done.returncode == 2
    assert "greet is defined twice: in tunewright_example.commands and in twin" in done.stderr
