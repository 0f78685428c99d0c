"""The CPU device, stricter: texts compile without warnings.

`watched` is for all tests of kernels: every text that is built for the CPU device has few undefined symbols.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tunewright.devices.native import object_symbols
from tunewright.devices.native.compiler import ClangCommands
from tunewright.devices.native.device import NativeDevice
from tunewright.devices.native.isa import Level
from tunewright.devices.native.processor import find_compiler
from tunewright.devices.native.programs import LoadedProgram, NativePrograms, is_opencl_c

#: what is no mistake, with the reason
EXCEPTIONS: dict[str, str] = {}
WARNINGS = ("-Wall", "-Wextra", "-Werror", *(f"-Wno-{name}" for name in EXCEPTIONS))

#: of double precision alone; single precision is plain arithmetic, but for what is left of a division
MATHEMATICS = frozenset(
    [
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "cos",
        "cosh",
        "erf",
        "exp",
        "expm1",
        "fmod",
        "fmodf",
        "log",
        "log1p",
        "pow",
        "sin",
        "sinh",
        "tan",
        "tanh",
    ]
)
#: what is an instruction only from SSE4.1 on
ROUNDING = frozenset(
    ["ceil", "ceilf", "floor", "floorf", "rint", "rintf", "roundeven", "roundevenf", "trunc", "truncf"]
)
#: compilers make calls of loops
MEMORY = frozenset({"memcpy", "memmove", "memset"})


class Warned(ClangCommands):
    """Lets the compiler warn."""

    @staticmethod
    def of(compiler: ClangCommands) -> Warned:
        return Warned(**{field.name: getattr(compiler, field.name) for field in dataclasses.fields(compiler)})

    def build(self, text: str, flags: Sequence[str], label: str = "kernel", entry: str = "") -> bytes:
        return super().build(text, [flag for flag in flags if flag != "-w"], label, entry)


def programs(level: Level, named: str, more: Sequence[str]) -> NativePrograms:
    """As a device has them, compiled with more flags, and with warnings."""
    compiler = find_compiler(named)
    assert compiler is not None
    return NativePrograms([*level.flags, *more], Warned.of(compiler), f"CPU {level.title}")


class StrictDevice(NativeDevice):
    family = "strict"

    @classmethod
    def available(cls) -> list[str] | str:
        found = super().available()
        return found if isinstance(found, str) else ["CPU.STRICT"]

    def _compile_for(self, level: Level, named: str) -> None:
        super()._compile_for(level, named)
        self._programs = programs(level, named, WARNINGS)


@contextmanager
def watched() -> Iterator[None]:
    """Kernels of the CPU device that need more of others than mathematics are a mistake."""
    build = NativeDevice.build

    def checked(self: NativeDevice, source: str) -> LoadedProgram:
        program = build(self, source)
        known = MATHEMATICS | MEMORY | (ROUNDING if self.level.name == "x86-64" else frozenset())
        wanting = set() if is_opencl_c(source) else set(object_symbols.undefined(program.binary)) - known
        assert not wanting, f"{', '.join(sorted(wanting))}: what kernels call must be in their own text"
        return program

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(NativeDevice, "build", checked)
        yield
