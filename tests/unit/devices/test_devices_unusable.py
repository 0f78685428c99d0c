"""Where the CPU device cannot be used: every command goes on or says why, and none ends in a traceback.

Each test is a process of its own in an environment that lacks something for real.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from tunewright.devices.native import compiler

SOURCE = Path(__file__).parents[3] / "src"
#: runs commands one after the other in one process, as the shell would: code, output, errors of each
RUNNER = """
import contextlib, io, json, sys, traceback
from tunewright import tools
told = []
for command in json.loads(sys.stdin.read()):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = tools.execute(command)
        except BaseException:
            traceback.print_exc()
            code = 1
    told.append([code, out.getvalue(), err.getvalue()])
json.dump(told, sys.__stdout__)
"""
CLANG = next((p for p in map(shutil.which, ("clang", *(f"clang-{n}" for n in range(30, 14, -1)))) if p), None)
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the CPU device needs Linux")
needs_clang = pytest.mark.skipif(CLANG is None, reason="there is no clang on PATH")
needs_compiler = pytest.mark.skipif(
    not sys.platform.startswith("linux") or compiler._zig_of_wheel() is None, reason="ziglang is not installed"
)


@dataclass(frozen=True)
class Place:
    """An environment: folders of its own, what PATH leads to, and which packages cannot be imported."""

    folder: Path

    def environment(self, hidden: Sequence[str], path: str, settings: Mapping[str, str]) -> dict[str, str]:
        shims = self.folder / "-".join(["hidden", *hidden])
        for name in hidden:
            (shims / name).mkdir(parents=True, exist_ok=True)
            text = "" if name == "ziglang" else f"raise ModuleNotFoundError('hidden: {name}', name='{name}')"
            (shims / name / "__init__.py").write_text(text)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TUNEWRIGHT_", "OCL_"))}
        return kept | {
            "PATH": path, "PYTHONPATH": os.pathsep.join(map(str, (shims, SOURCE))),
            "TUNEWRIGHT_CACHE_DIR": str(self.folder / "cache"), "XDG_DATA_HOME": str(self.folder / "data"),
            "TUNEWRIGHT_TUNE_RESULT_PATH": "",
        } | settings  # fmt: skip

    def python(
        self, text: str, given: str = "", hidden: Sequence[str] = ("ziglang", "pyopencl"), path: str | None = None,
        **settings: str,
    ) -> str:  # fmt: skip
        """What a program prints in it."""
        (self.folder / "empty").mkdir(exist_ok=True)
        environment = self.environment(hidden, str(self.folder / "empty") if path is None else path, settings)
        done = subprocess.run(
            [sys.executable, "-c", text], input=given, env=environment, cwd=self.folder, text=True, timeout=300,
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr if text != RUNNER else done.stdout

    def run(self, *commands: str, **how: Any) -> list[tuple[int, str, str]]:
        """Commands, with their exit codes and what they print."""
        told = json.loads(self.python(RUNNER, json.dumps([c.split() for c in commands]), **how))
        for command, (_, out, err) in zip(commands, told, strict=True):
            assert "Traceback" not in out + err, f"{command}:\n{err}"
        return [(code, out, err) for code, out, err in told]


def save(path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {"w": (8, 3, 3, 3), "m": (8, 10)}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["g"], name="pool"),
        helper.make_node("Flatten", ["g"], ["f"], name="flat"),
        helper.make_node("MatMul", ["f", "m"], ["y"], name="product"),
    ]
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])],
        [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), name) for name, s in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    save(tmp_path / "model.onnx")
    return Place(tmp_path)


SHAPE = "--shape x=2x3x8x8"
ON_CPU = (
    f"run model.onnx {SHAPE} --no-save", f"benchmark model.onnx {SHAPE} -t 0.02",
    f"compare model.onnx {SHAPE} --against reference", f"explain model.onnx {SHAPE}",
    f"tune model.onnx {SHAPE} --budget 1s", f"lock model.onnx {SHAPE} -c LOCK_FILE=lock.json",
    "query model.onnx", f"place model.onnx -d HETERO:CPU {SHAPE}",
    f"run model.onnx {SHAPE} --no-save -d AUTO", f"run model.onnx {SHAPE} --no-save -d MULTI:CPU",
    f"run model.onnx {SHAPE} --no-save -d HETERO:CPU", "driver softmax --input float32[4,64]",
)  # fmt: skip


@needs_linux
def test_without_a_compiler_everything_runs_in_numpy_and_one_warning_says_what_to_install(place: Place) -> None:
    told = place.run("devices --json", *ON_CPU)
    assert [code for code, _, _ in told] == [0] * len(told), [err for _, _, err in told]
    listed = json.loads(told[0][1])
    assert {d["name"]: d.get("family") for d in listed["devices"]}["CPU"] == "host"
    assert "there is no C compiler" in listed["unusable"]["CPU.NATIVE"]
    assert "pip install ziglang" in listed["unusable"]["CPU.NATIVE"]
    warned = [err for _, _, err in told if "CPU computes in numpy" in err]
    assert len(warned) == 1 and "pip install ziglang" in warned[0]


@needs_linux
def test_names_of_devices_that_cannot_be_used(place: Place) -> None:
    single, unknown, *over = place.run(
        f"run model.onnx {SHAPE} --no-save -d CPU.NATIVE", f"run model.onnx {SHAPE} --no-save -d NPU",
        f"run model.onnx {SHAPE} --no-save -d AUTO:CPU.NATIVE,CPU.HOST",
        f"run model.onnx {SHAPE} --no-save -d MULTI:CPU.NATIVE,CPU.HOST",
        f"run model.onnx {SHAPE} --no-save -d HETERO:CPU.NATIVE,CPU.HOST",
        f"run model.onnx {SHAPE} --no-save -d MULTI:CPU.NATIVE,NPU",
        f"run model.onnx {SHAPE} --no-save -d MULTI:CPU.NATIVE",
    )  # fmt: skip
    assert single[0] == 2 and "CPU.NATIVE cannot be used: there is no C compiler" in single[2]
    assert unknown[0] == 2 and "there is no device 'NPU'" in unknown[2]
    for text in ("the devices are CPU, CPU.HOST", "CPU.NATIVE: there is no C compiler", "opencl: pyopencl", "cuda: "):
        assert text in unknown[2], "those that there are, and those that cannot be used, with reasons"
    for (code, _, err), kind in zip(over, ("AUTO", "MULTI", "HETERO"), strict=False):
        assert code == 0 and f"{kind} does without a device: CPU.NATIVE cannot be used" in err
    assert over[3][0] == 2 and "there is no device 'NPU'" in over[3][2], "a name that nobody has is a mistake"
    assert over[4][0] == 2 and "CPU.NATIVE cannot be used" in over[4][2], "none is left"


#: instructions of other processors
OTHER = "ARMV8-A" if platform.machine() in ("x86_64", "AMD64") else "X86-64-V3"
MISTAKES = [
    ({"TUNEWRIGHT_CPU_COMPILER": "/nowhere/clang"}, "CPU_COMPILER: there is no program '/nowhere/clang'"),
    ({"TUNEWRIGHT_CPU_COMPILER": shutil.which("false") or "false"}, "is not clang (name a clang, 15 or newer"),
    ({"TUNEWRIGHT_CPU_COMPILER": "{old}"}, "is clang version 11.0.1, which is too old"),
    ({"TUNEWRIGHT_CPU_ISA": OTHER}, "CPU_ISA: this processor does not"),
    ({"TUNEWRIGHT_KERNEL_SYMBOLS_DIR": "model.onnx/kept"}, "KERNEL_SYMBOLS_DIR: compiled kernels cannot be kept"),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(("settings", "why"), MISTAKES)
def test_a_setting_that_is_a_mistake_is_told_and_nothing_else_serves_instead(
    settings: dict[str, str], why: str, place: Place
) -> None:
    old = place.folder / "old-clang"
    old.write_text("#!/bin/sh\necho Debian clang version 11.0.1-2\n")
    old.chmod(0o755)
    settings = {key: value.format(old=old) for key, value in settings.items()}
    (code, out, _), host, *told = place.run(
        "devices --json", f"run model.onnx {SHAPE} --no-save -d CPU.HOST", *ON_CPU,
        hidden=["pyopencl"], path=os.environ["PATH"], **settings,
    )  # fmt: skip
    assert code == 0 and why in json.loads(out)["unusable"]["CPU.NATIVE"]
    assert host[0] == 0, "what needs no compiler goes on"
    for (code, _, err), command in zip(told, ON_CPU, strict=True):
        assert code == 2 and why in err, command


#: shapes that come one after the other, a node whose shape depends on data, and bodies
CHANGING = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n] x, int64[1] s, bool c) => (float[m] y) {
  e = Constant<value_ints = [1000000]>()
  a = Slice(x, s, e)
  b = Mul(a, a)
  i = NonZero(a)
  f = Cast<to = 1>(i)
  t = ReduceSum<keepdims = 0>(f)
  d = If (c) <
    then_branch = one () => (float[k] o) { o = Exp(b) },
    else_branch = two () => (float[k] o) { o = Tanh(b) }
  >
  y = Add(d, t)
}
"""
PROGRAM = """
import logging
import numpy as np
from tunewright import Core
logging.basicConfig(level=logging.WARNING, format="%(message)s")
core = Core()
for model in ("model.onnx", "changing.onnx"):
    ours, host = (core.compile_model(model, device) for device in ("CPU", "CPU.HOST"))
    for n in (1, 3, 2):
        rng = np.random.default_rng(n)
        given = {"x": rng.normal(size=(n, 3, 8, 8)).astype(np.float32)}
        if model == "changing.onnx":
            given = {"x": rng.normal(size=7 * n).astype(np.float32), "s": np.array([n]), "c": np.array(n == 1)}
        np.testing.assert_allclose(ours(given)["y"], host(given)["y"], 1e-4, 1e-5)
"""


@needs_compiler
def test_open_shapes_and_bodies_run_in_numpy_where_kernels_are_missing(place: Place) -> None:
    onnx.save(onnx.parser.parse_model(CHANGING), place.folder / "changing.onnx")
    place.python("import tunewright; tunewright.Core().available_devices", hidden=["pyopencl"], path=os.environ["PATH"])
    said = place.python(PROGRAM)
    assert said.count("models that lack a kernel compute in numpy") == 1 and "CPU computes in numpy" not in said
    assert "numpy" not in place.python(PROGRAM, hidden=["pyopencl"], path=os.environ["PATH"])


@needs_compiler
def test_without_a_compiler_what_is_in_the_cache_still_runs_and_the_rest_runs_in_numpy(place: Place) -> None:
    with_it = {"hidden": ["pyopencl"], "path": os.environ["PATH"]}
    ((code, out, _),) = place.run("devices --json", **with_it)
    assert code == 0 and "CPU.NATIVE" not in json.loads(out)["unusable"]
    # The device is there out of the cache; no kernel is.
    *told, driver = place.run("devices --json", *ON_CPU)
    assert [code for code, _, _ in told] == [0] * len(told), [err for _, _, err in told]
    assert driver[0] == 2 and "there is no C compiler" in driver[2], "it times kernels that cannot be made"
    assert "CPU.NATIVE" not in json.loads(told[0][1])["unusable"]
    warned = [err for _, _, err in told if "models that lack a kernel compute in numpy" in err]
    assert len(warned) == 1 and "pip install ziglang" in warned[0]
    # Now its kernels are there, too.
    place.run(f"run model.onnx {SHAPE} --no-save", **with_it)
    ((code, out, err),) = place.run(f"explain model.onnx {SHAPE}")
    assert code == 0 and "numpy" not in err and "opencl.conv" in out


@needs_linux
@needs_clang
@pytest.mark.parametrize("named", [True, False])
def test_a_clang_on_path_will_do(named: bool, place: Place) -> None:
    assert CLANG is not None
    if named:
        how = {"path": os.environ["PATH"], "TUNEWRIGHT_CPU_COMPILER": Path(CLANG).name}
    else:  # it is looked for; it takes a linker from PATH
        how = {"path": os.environ["PATH"]}
    (code, out, _), run = place.run("devices --json", f"run model.onnx {SHAPE} --no-save", **how)
    assert code == 0 and run[0] == 0 and "numpy" not in run[2]
    (native,) = [device for device in json.loads(out)["devices"] if device["name"] == "CPU.NATIVE"]
    assert native["software"]["compiler"].startswith("clang ")


@needs_linux
def test_a_clang_that_is_too_old_is_passed_over_and_told(place: Place) -> None:
    path = place.folder / "bin"
    path.mkdir()
    (path / "clang").write_text("#!/bin/sh\necho clang version 11.0.1\n")
    (path / "clang").chmod(0o755)
    ((code, out, _),) = place.run("devices --json", path=str(path))
    assert code == 0 and "is clang version 11.0.1, which is too old" in json.loads(out)["unusable"]["CPU.NATIVE"]


@needs_compiler
@pytest.mark.parametrize("lacking", ["home", "temporary folder"])
def test_without_a_home_or_a_temporary_folder(lacking: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {}
    if lacking == "home":
        monkeypatch.delenv("HOME", raising=False)
    else:
        settings["TMPDIR"] = str(place.folder / "nowhere" / "at all")
    how = {"hidden": ["pyopencl"], "path": os.environ["PATH"], **settings}
    told = place.run("devices --json", *ON_CPU[:4], **how)
    assert [code for code, _, _ in told] == [0] * len(told), [err for _, _, err in told]
    assert "CPU.NATIVE" not in json.loads(told[0][1])["unusable"]


@needs_compiler
def test_where_nothing_can_be_written_the_cpu_is_numpy_and_says_why(place: Place) -> None:
    """No folder for temporary files, no memory for files, no cache: the one thing that works is the model itself."""
    text = (
        "import os, sys\nfrom tunewright.devices.native import compiler\n"
        "compiler._MEMORY = 'model.onnx'\nimport tempfile\ntempfile._candidate_tempdir_list = lambda: ['model.onnx']\n"
        "from tunewright import tools\n"
        f"sys.exit(tools.execute('run model.onnx {SHAPE} --no-save'.split()))"
    )
    how = {"hidden": ["pyopencl"], "path": os.environ["PATH"], "TUNEWRIGHT_CACHE_DIR": "model.onnx/none"}
    said = place.python(text, **how)
    assert "CPU computes in numpy" in said and "needs a folder for temporary files" in said and "TMPDIR" in said
