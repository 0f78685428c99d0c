"""The CPU device, stricter: texts compile without warnings, and need few symbols of others."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from tunewright.devices.native.compiler import Compiler
from tunewright.devices.native.device import NativeDevice
from tunewright.devices.native.isa import Level
from tunewright.devices.native.processor import find_compiler
from tunewright.devices.native.programs import Program, Programs

#: what is no mistake, with the reason
EXCEPTIONS: dict[str, str] = {
}
WARNINGS = ("-Wall", "-Wextra", "-Werror", *(f"-Wno-{name}" for name in EXCEPTIONS))

#: of double precision alone; single precision is plain arithmetic
MATHEMATICS = frozenset(
    [
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp", "expm1", "fmod", "log", "log1p",
        "pow", "sin", "sinh", "tan", "tanh",
    ]
)
#: compilers make calls of loops
MEMORY = frozenset({"memcpy", "memmove", "memset"})


class Warned(Compiler):
    """Lets the compiler warn."""

    @staticmethod
    def of(compiler: Compiler) -> Warned:
        return Warned(**{field.name: getattr(compiler, field.name) for field in dataclasses.fields(compiler)})

    def build(self, text: str, flags: Sequence[str], label: str = "kernel", language: str = "c") -> bytes:
        return super().build(text, [flag for flag in flags if flag != "-w"], label, language)


def programs(level: Level, named: str, more: Sequence[str]) -> Programs:
    """As a device has them, compiled with more flags, and with warnings."""
    compiler = find_compiler(named)
    assert compiler is not None
    return Programs([*level.flags, *more], Warned.of(compiler), f"CPU {level.title}")


class StrictDevice(NativeDevice):
    family = "strict"

    @classmethod
    def available(cls) -> list[str] | str:
        found = super().available()
        return found if isinstance(found, str) else ["CPU.STRICT"]

    def _compile_for(self, level: Level, named: str) -> None:
        super()._compile_for(level, named)
        self._programs = programs(level, named, WARNINGS)

    def build(self, source: str) -> Program:
        program = super().build(source)
        wanting = set(undefined(program.binary)) - MATHEMATICS - MEMORY
        assert not wanting, f"{', '.join(sorted(wanting))}: what kernels call must be in their own text"
        return program


def undefined(binary: bytes) -> Iterator[str]:
    """Names that a 64-bit shared object expects others to define."""
    (sections,) = struct.unpack_from("<Q", binary, 40)
    size, count = struct.unpack_from("<HH", binary, 58)
    headers: list[Any] = [struct.unpack_from("<IIQQQQIIQQ", binary, sections + n * size) for n in range(count)]
    for _, kind, _, _, begin, length, link, _, _, entry in headers:
        if kind != 11:  # dynamic symbols
            continue
        strings = headers[link][4]
        for at in range(begin + entry, begin + length, entry):
            name, _, _, section = struct.unpack_from("<IBBH", binary, at)
            if section == 0:
                first = strings + name
                yield binary[first : binary.index(b"\0", first)].decode()
