"""A device that runs nothing: the texts of its kernels, in both dialects, must parse without warnings.

It is of any instruction set, whatever the machine's processor has.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from conformance import strict
from conformance.elsewhere import ImmediateQueue
from tunewright.devices.base import Queue, Target
from tunewright.devices.c_device import CDevice
from tunewright.devices.native import isa
from tunewright.devices.native.compiler import FLAGS, find
from tunewright.solvers.base import Config, Problem, Solver
from tunewright.solvers.c.source.base import CKernel
from tunewright.testing import kernelcheck

PREFIX = "CPU.SYNTAX."
LEVELS = {level.name.upper(): level for levels in isa.LEVELS.values() for level in levels}
#: what compilers of OpenCL declare in a header, which the package ziglang lacks
_OPENCL = """
typedef unsigned char uchar; typedef unsigned short ushort; typedef unsigned int uint; typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
#define as_float(x) __builtin_astype(x, float)
#define as_uint(x) __builtin_astype(x, uint)
#define as_double(x) __builtin_astype(x, double)
#define as_ulong(x) __builtin_astype(x, ulong)
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
"""
_DIALECTS = {
    "c": ("-x", "c", *FLAGS),
    "opencl": ("-x", "cl", "-cl-std=CL1.2", "-cl-no-stdinc", "-Xclang", "-fdeclare-opencl-builtins"),
}


class SyntaxDevice(CDevice):
    """Has no programs."""

    family = "syntax"
    dialect = "c"
    level: isa.Level

    @classmethod
    def available(cls) -> list[str] | str:
        return [PREFIX + cls.level.name.upper()]

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.target = Target(
            "cpu", "any", self.level.title, 2, (("runtime", "native"),), "c", "", self.level.vector_bytes,
            self.level.registers,
        )  # fmt: skip

    def queue(self) -> ImmediateQueue:
        return ImmediateQueue()

    def build(self, source: str) -> Any:
        assert not (said := warnings(source, "c", self.level)), said
        pytest.skip("nothing runs here")

    def launch(self, queue: Queue, program: Any, name: str, grid: Sequence[int], local: Sequence[int] = ()) -> Any:
        pytest.skip("nothing runs here")


def of_level(name: str) -> type[SyntaxDevice]:
    """The device of such a name; from now on kernels are not run but parsed, whichever test asks."""

    class Made(SyntaxDevice):
        level = LEVELS[name.removeprefix(PREFIX)]

    def run_one(
        case: kernelcheck.Case, problem: Problem, solver: Solver, config: Config, device: Any, want: Sequence[Any]
    ) -> str:
        kernel = solver.compile(problem, config, device)
        assert isinstance(kernel, CKernel)
        dialects = ["c"] if Made.level in isa.LEVELS["aarch64"] else [*_DIALECTS]  # there OpenCL has no fp64 by itself
        texts = [(call.program(dialect), dialect) for call in kernel.calls for dialect in dialects]
        return "\n".join(filter(None, (warnings(*text, Made.level) for text in texts)))

    kernelcheck.run_one = run_one
    return Made


@cache
def warnings(text: str, dialect: str, level: isa.Level) -> str:
    """What the compiler says of a text; empty: nothing."""
    command = [find().compile[0], *(("clang",) if find().compile[1:2] == ("clang",) else ())]
    target = "aarch64-linux-gnu" if level in isa.LEVELS["aarch64"] else "x86_64-linux-gnu"
    given = _OPENCL + text if dialect == "opencl" else text
    done = subprocess.run(
        [*command, f"--target={target}", *_DIALECTS[dialect], *level.flags, *strict.WARNINGS, "-fsyntax-only", "-"],
        input=given, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stderr[:2000] if done.returncode or done.stderr else ""
