"""One op, one solver, one strategy, one device and one sub-command from outside the package: one new file each.

They are installed as pip would leave them: a module per extension and the entry points of a distribution, on the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunewright import discovery
from tunewright.errors import ExtensionError

SOURCE = Path(__file__).parents[3] / "src"

OP = '''
"""An operator of our own domain: x squared plus one."""
import numpy as np
from tunewright.ops.base import OpSpec
from tunewright.ops.shapes import same_as


def reference(inputs, attrs, n):
    return [np.asarray(inputs[0] ** 2 + attrs.get("plus", 1))]


OPS = (OpSpec("com.example::SquarePlus", reference, same_as()),)
'''

SOLVER = '''
"""A faster way to do it, for problems that it understands."""
from tunewright.solvers.base import Kernel, Solver


class SquareKernel(Kernel):
    name = "example.square"

    def run(self, queue, inputs, outputs):
        result = inputs[0] * inputs[0] + 1
        if outputs[0] is None:
            return [result]
        outputs[0][...] = result
        return list(outputs)


class SquareSolver(Solver):
    id = "example.square"
    rank = 1
    host = True

    def why_not(self, problem, target):
        if problem.op != "com.example::SquarePlus":
            return f"solves SquarePlus, not {problem.op}"
        return "adds 1 only" if problem.attrs.get("plus", 1) != 1 else None

    def compile(self, problem, config, device):
        return SquareKernel()


SOLVERS = (SquareSolver(),)
'''

STRATEGY = '''
"""Asks in the order of the space, from its end."""
from tunewright.search.base import Strategy


class Backwards(Strategy):
    name = "example-backwards"

    def propose(self):
        codes = [self.space.code(config) for config in self.space]
        return next((code for code in reversed(codes) if code not in self.seen), None)


STRATEGIES = (Backwards,)
'''

DEVICE = '''
"""The host under another name."""
from tunewright.devices.host import HostDevice


class Example(HostDevice):
    family = "example"

    @classmethod
    def available(cls):
        return ["EXAMPLE"]


DEVICES = (Example,)
'''

COMMAND = '''
"""A sub-command."""


def greet(name: str = "you") -> None:
    """Say hello."""
    print(f"hello, {name}")


COMMANDS = (greet,)
'''

FILES = {"ops": OP, "solvers": SOLVER, "strategies": STRATEGY, "devices": DEVICE, "commands": COMMAND}


def install(folder: Path, distribution: str, files: dict[str, str]) -> None:
    """What ``pip install`` leaves behind."""
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = []
    for group, code in files.items():
        module = f"{distribution}_{group}"
        (folder / f"{module}.py").write_text(code)
        lines.append(f"[tunewright.{group}]\n{distribution} = {module}\n")
    (info / "entry_points.txt").write_text("\n".join(lines))


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(SOURCE)])}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    install(folder, "example", FILES)
    return folder


def check(site: Path, code: str) -> str:
    done = python(site, "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


MODEL = """
import numpy as np, onnx
from onnx import helper
from tunewright import Core
def model(**attrs):
    node = helper.make_node("SquarePlus", ["x"], ["y"], name="it", domain="com.example", **attrs)
    info = [helper.make_tensor_value_info(n, 1, [2]) for n in "xy"]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.example", 1)]
    return helper.make_model(helper.make_graph([node], "g", info[:1], info[1:]), opset_imports=imports)
x = np.array([2, 3], np.float32)
"""


def test_every_group_is_covered() -> None:
    """A new kind of extension needs a test here."""
    assert {f"tunewright.{group}" for group in FILES} == set(discovery.GROUPS)


def test_op(site: Path) -> None:
    """It runs in a model; with an attribute that only the reference knows, so that the reference is what runs."""
    assert (
        check(site, f"{MODEL}\nprint(Core().compile_model(model(plus=3))({{'x': x}})['y'].tolist())") == "[7.0, 12.0]"
    )


WELL_SERVED = '''
"""An operator with everything that a definition may say about it: rows divided by their sums, times a scale."""
import numpy as np
from tunewright.ops import batch_rules
from tunewright.ops.base import OpSpec, Sample
from tunewright.ops.shapes import same_as


def reference(inputs, attrs, n):
    x, scale = inputs
    return [(x / x.sum(-1, keepdims=True) * scale).astype(x.dtype)]


def samples(rng):
    for shape in ((3, 4), (2, 3, 5)):
        yield Sample([rng.random(shape, np.float32) + 1, rng.random(shape[-1:], np.float32)], {})


OPS = (
    OpSpec(
        "com.example::RowShare", reference, same_as(), flops=lambda inputs, outputs, attrs: 3.0 * outputs[0].size,
        samples=samples, batch=batch_rules.along(-1), roles=("input", "scale"), op_class="norm", heavy=True,
    ),
)
'''

USE_WELL_SERVED = """
import numpy as np
from onnx import TensorProto, helper, numpy_helper
from tunewright import Core, Settings
from tunewright.ops import lookup
from tunewright.plugins.batching import batch_axis
from tunewright.testing.opcheck import assert_op
from tunewright.tuning.offline.command_form import class_of, form
from tunewright.tuning.policy import op_class

name = "com.example::RowShare"
spec = lookup(name)
assert_op(spec)
assert (class_of(name), op_class(name), form(name).roles) == ("norm", "reduce", ("input", "scale"))

def model(axes):
    node = helper.make_node("RowShare", ["x", "s"], ["y"], name="it", domain="com.example")
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, axes) for n in "xy"]
    scale = numpy_helper.from_array(np.arange(axes[-1], dtype=np.float32), "s")
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.example", 1)]
    return helper.make_model(helper.make_graph([node], "g", info[:1], info[1:], [scale]), opset_imports=imports)

core = Core()
assert batch_axis.why_not(core.read_model(model([1, 4])), Settings()) == ""
assert "along the axis of the examples" in batch_axis.why_not(core.read_model(model([1])), Settings())
x = np.array([[1, 1, 2, 4]], np.float32)
print(core.compile_model(model([1, 4]))({"x": x})["y"].tolist())
"""


def test_a_well_served_op_is_one_file(tmp_path: Path) -> None:
    """Its rule for batches, its options on the command line and how it is searched all stand in its definition."""
    install(tmp_path, "served", {"ops": WELL_SERVED})
    assert check(tmp_path, USE_WELL_SERVED) == "[[0.0, 0.125, 0.5, 1.5]]"
    line = ["norm", "--op", "com.example::RowShare", "--input", "float32[4,8]", "--scale", "float32[8]"]
    done = python(tmp_path, "-m", "tunewright", "driver", *line, "--seconds", "0")
    assert "RowShare(float32[4,8], float32[8]!)" in done.stdout + done.stderr, done.stderr


def test_solver(site: Path) -> None:
    """It is chosen for its problem, refuses others with a reason, and its kernel gives the result."""
    code = f"""{MODEL}
for plus in (1, 3):
    compiled = Core().compile_model(model(plus=plus))
    (step,) = compiled.program.plans[0].steps
    print(step.choice.solver.id, step.choice.rejected.get("example.square", "-"), compiled({{"x": x}})["y"].tolist())
"""
    assert check(site, code).splitlines() == [
        "example.square - [5.0, 10.0]",
        "host.reference adds 1 only [7.0, 12.0]",
    ]


def test_strategy(site: Path) -> None:
    code = """
from tunewright import search
assert "example-backwards" in search.names()
space = search.Space({"a": [1, 2, 3]})
print([c["a"] for c in search.create("example-backwards", space).ask(3)])
"""
    assert check(site, code) == "[3, 2, 1]"


def test_device(site: Path) -> None:
    code = f"""{MODEL}
assert "EXAMPLE" in Core().available_devices
compiled = Core().compile_model(model(), "EXAMPLE")
print(compiled.env.device.family, compiled({{"x": x}})["y"].tolist())
"""
    assert check(site, code) == "example [5.0, 10.0]"


def test_command(site: Path) -> None:
    done = python(site, "-m", "tunewright", "greet", "--name", "Ada")
    assert (done.returncode, done.stdout.strip()) == (0, "hello, Ada"), done.stderr
    assert "greet" in python(site, "-m", "tunewright", "--help").stdout


@pytest.mark.parametrize(
    ("group", "code", "name"),
    [
        ("ops", "from tunewright.ops import lookup; lookup('Relu')", "com.example::SquarePlus"),
        ("solvers", "from tunewright.solvers.base import solvers; solvers()", "example.square"),
        ("strategies", "from tunewright import search; search.names()", "example-backwards"),
        ("devices", "from tunewright import Core; Core().available_devices", "example"),
        ("commands", "from tunewright.tools import main; main(['--help'])", "greet"),
    ],
)
def test_the_same_name_twice(group: str, code: str, name: str, tmp_path: Path) -> None:
    """Two distributions that define one thing: an error that names both, not a silent choice."""
    install(tmp_path, "first", {group: FILES[group]})
    install(tmp_path, "second", {group: FILES[group]})
    done = python(tmp_path, "-c", code)
    assert done.returncode != 0
    for part in (name, "twice", f"first_{group}", f"second_{group}", "uninstall or rename"):
        assert part in done.stderr, done.stderr


def test_broken_extension_is_named(tmp_path: Path) -> None:
    install(tmp_path, "broken", {"commands": "raise RuntimeError('half written')"})
    done = python(tmp_path, "-m", "tunewright", "--help")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    for part in ("broken = broken_commands", "half written", "uninstall"):
        assert part in done.stderr


@pytest.mark.parametrize(
    "name, text, offers",
    [
        ("a-1.dist-info", "[tunewright.ops]\nx = y\n", True),
        ("a-1.dist-info", "[console_scripts]\nx = tunewright.tools:main\n", False),
        ("a-1.dist-info", "[console_scripts]\nx = y\n\n  [ tunewright.solvers ]\nx = y\n", True),
        ("a.egg-info", "[tunewright.devices]\nx = y\n", True),
        ("a-1.dist-info", None, False),
        ("a.egg", None, True),
        ("a", "[tunewright.ops]\nx = y\n", False),
    ],
)
def test_who_may_offer_extensions(name: str, text: str | None, offers: bool, tmp_path: Path) -> None:
    """Entry points are read when some distribution has a group of ours: to read them takes long."""
    (tmp_path / name).mkdir()
    if text is not None:
        (tmp_path / name / "entry_points.txt").write_text(text)
    assert discovery._offers(str(tmp_path)) == offers
    assert not discovery._offers(str(tmp_path / "not there"))


def test_an_archive_on_the_path_may_offer_extensions(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"")
    assert discovery._offers(str(tmp_path / "a.zip"))


def test_duplicate_of_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ships cannot be replaced silently either."""
    from types import ModuleType

    mine = ModuleType("mine")
    mine.DEVICES = (type("Mine", (), {"family": "host"}),)  # type: ignore[attr-defined]
    inside = list(discovery.modules("tunewright.devices"))
    monkeypatch.setattr(discovery, "modules", lambda group, skip=None: [*inside, mine])
    with pytest.raises(ExtensionError, match=r"host is defined twice: in tunewright\.devices\.host and in mine"):
        discovery.find("tunewright.devices", key=lambda d: d.family)
