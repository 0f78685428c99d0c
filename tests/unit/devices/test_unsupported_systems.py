"""Systems and processors without kernels: what pip installs there, and what users are told."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tunewright.devices.native import compiler, processor
from tunewright.errors import DeviceError

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
(ZIGLANG,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "ziglang"]


@pytest.mark.parametrize(
    ("system", "machine", "installed"),
    [
        ("linux", "x86_64", True), ("linux", "aarch64", True), ("linux", "riscv64", False), ("linux", "i686", False),
        ("darwin", "arm64", False), ("darwin", "x86_64", False), ("win32", "AMD64", False),
    ],
)  # fmt: skip
def test_pip_installs_the_compiler_where_there_are_kernels(system: str, machine: str, installed: bool) -> None:
    """Elsewhere it must not stand in the way of the rest."""
    assert ZIGLANG.marker is not None
    assert ZIGLANG.marker.evaluate({"sys_platform": system, "platform_machine": machine}) is installed
    for line in PROJECT["dependencies"]:
        assert "ziglang" in line or Requirement(line).marker is None


def test_the_compiler_is_of_the_tested_range() -> None:
    found = re.findall(r"\d+\.\d+\.\d+", (Path(__file__).parents[3] / "docs" / "devices.md").read_text("utf-8"))
    tested = [version for version in found if version in ("0.14.0", "0.15.2", "0.16.0", "0.17.0")]
    assert set(tested) == {"0.14.0", "0.15.2", "0.16.0", "0.17.0"} and all(v in ZIGLANG.specifier for v in tested)
    assert "0.13.0" not in ZIGLANG.specifier and "0.18.0" not in ZIGLANG.specifier
    if compiler._zig_of_wheel() is not None:
        assert importlib.metadata.version("ziglang") in ZIGLANG.specifier


def test_windows_is_refused_in_a_sentence() -> None:
    code = "import sys; sys.platform = 'win32'; import tunewright"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode and "ImportError: Tunewright does not run on Windows" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("system", "machine", "said"),
    [("darwin", "arm64", "pool needs Linux, this is darwin"), ("linux", "riscv64", "no kernels for riscv64")],
)
def test_what_has_no_kernels_says_so(monkeypatch: pytest.MonkeyPatch, system: str, machine: str, said: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(DeviceError, match=said) as error:
        processor.processor.__wrapped__()
    assert error.value.hint == "CPU.HOST runs here"
