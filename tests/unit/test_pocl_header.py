"""PoCL builds programs with the part of its header that they name: the same machine code, sooner."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tunewright.devices import pocl_header, programs
from tunewright.devices.opencl import OpenCLDevice
from tunewright.errors import ExecutionError
from tunewright.plugins.single import available

pytestmark = pytest.mark.skipif("CPU.POCL" not in available()[0], reason="PoCL is not installed")

TEXT = """
#define KEPT 1
float one(float x);
#ifdef A
float two(float x);  // a comment \\
  that goes on
#else
float two(float x,
          float y);
float three(float x);
#endif
typedef int four;
#if defined(B) && \\
    defined(C)
int __attribute__((pure)) five(int);
#endif
"""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> OpenCLDevice:
    monkeypatch.setenv("TUNEWRIGHT_CACHE_DIR", "")
    made = OpenCLDevice("CPU.POCL")
    assert made.build("kernel void first(global float* y) { y[0] = 1; }")  # the libraries are loaded
    return made


def library() -> Path:
    (found,) = programs._files("libpocl")
    return found


def test_every_declaration_of_what_a_source_names() -> None:
    header = pocl_header.Header("first", TEXT)
    always = ["first", "#define KEPT 1", "typedef int four;"]
    assert header.part("").split("\n") == always
    assert header.part("one(two + three)").split("\n") == [
        "first", "#define KEPT 1", "float one(float x);", "#ifdef A", "float two(float x);", "#endif", "#ifdef A",
        "#else", "float two(float x, float y);", "float three(float x);", "#endif", "typedef int four;",
    ]  # fmt: skip
    end = ["#if defined(B) &&      defined(C)", "int __attribute__((pure)) five(int);", "#endif"]
    assert header.part("five").split("\n") == [*always, *end]


@pytest.mark.parametrize("text", ["#if 1", "int f(int", "int f(\n#if 1\nint);\n#endif", "#endif"])
def test_a_header_that_is_not_understood(text: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        pocl_header.Header("", text)


def test_a_header_that_is_not_there_or_another(tmp_path: Path) -> None:
    assert pocl_header.shorter("kernel", tmp_path / "libpocl.so") is None
    folder = tmp_path / "share" / "pocl" / "include"
    folder.mkdir(parents=True)
    for name in ("_clang_opencl.h", "opencl-c.h", "opencl-c-base.h"):
        (folder / name).write_text("int f(int);\n")
    assert pocl_header.shorter("kernel", tmp_path / "libother.so") is None


def test_the_whole_header_for_what_pocl_changes_in_it(device: OpenCLDevice) -> None:
    assert pocl_header.shorter("int y = ilogb(x);", library()) is None
    assert pocl_header.shorter("int y = sin(x);", library()) is not None


def test_all_overloads_are_declared(device: OpenCLDevice) -> None:
    short = pocl_header.shorter("kernel void f(global float* y) { y[0] = sin(y[0]); }", library())
    assert short is not None and len(short) < 60_000
    assert len(re.findall(r"\bsin\(", short)) == 1 + 3 * 6  # float, double and half; one and five vectors
    assert "cos(" not in short


#: Element-wise with every function of the prelude, vectors, doubles, half floats and integers.
CODE = """
import hashlib, sys
import numpy as np
from tunewright.devices import pocl, pocl_header
from tunewright.devices.opencl import OpenCLDevice
from tunewright.testing.kernelcheck import Case, check
if sys.argv[1] == "whole":
    pocl_header.shorter = lambda *_: None
x = np.linspace(-3, 3, 40, dtype=np.float32).reshape(4, 10)
cases = [
    Case("Softmax", [x]), Case("Erf", [x.astype(np.float64)]), Case("Tanh", [x.astype(np.float16)]),
    Case("MatMul", [x, x.T.copy()], constant=frozenset({1})), Case("Mod", [np.arange(9), np.arange(9) + 1]),
]
device = OpenCLDevice("CPU.POCL")
assert not any(check(case, configs=0, device=device) for case in cases)
made = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in pocl.private().programs.rglob("*.so"))
print(len(made) >= len(cases), made)
"""


def test_the_machine_code_is_the_same() -> None:
    """In processes of their own: nothing was compiled in them before."""
    environment = {**os.environ, "TUNEWRIGHT_CACHE_DIR": ""}
    part, whole = (
        subprocess.run([sys.executable, "-c", CODE, how], env=environment, capture_output=True, text=True, check=True)
        for how in ("part", "whole")
    )
    assert part.stdout.startswith("True") and part.stdout == whole.stdout


def test_a_name_that_a_macro_makes(device: OpenCLDevice) -> None:
    """It is not declared at first."""
    source = "#define F(name) name##t\nkernel void f(global float* y) { y[0] = F(sqr)(y[0]); }"
    assert device.build(source).f.num_args == 1


def test_an_error_names_the_line_of_the_source(device: OpenCLDevice) -> None:
    with pytest.raises(ExecutionError, match=r":2:\d+.*unknown_name"):
        device.build("kernel void f(global float* y) {\n y[0] = unknown_name; }")
