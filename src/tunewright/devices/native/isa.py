"""Instruction sets: the features of a processor, and the levels that kernels are compiled for."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace

#: for x86-64, by clang's name of the feature: (index of the word from `processor_features`, bit, registers that must be
#: saved)
_NONE, _AVX, _AVX512 = 0x0, 0x6, 0xE6
_X86 = {
    "sse3": (2, 0, _NONE), "ssse3": (2, 9, _NONE), "cx16": (2, 13, _NONE), "sse4.1": (2, 19, _NONE),
    "sse4.2": (2, 20, _NONE), "movbe": (2, 22, _NONE), "popcnt": (2, 23, _NONE), "avx": (2, 28, _AVX),
    "f16c": (2, 29, _AVX), "fma": (2, 12, _AVX), "bmi": (5, 3, _NONE), "avx2": (5, 5, _AVX), "bmi2": (5, 8, _NONE),
    "avx512f": (5, 16, _AVX512), "avx512dq": (5, 17, _AVX512), "avx512cd": (5, 28, _AVX512),
    "avx512bw": (5, 30, _AVX512), "avx512vl": (5, 31, _AVX512),
    "avx512vnni": (6, 11, _AVX512), "avxvnni": (8, 4, _AVX), "avx512bf16": (8, 5, _AVX512),
    "avx512fp16": (7, 23, _AVX512), "lzcnt": (12, 5, _NONE), "sahf": (12, 0, _NONE),
}  # fmt: skip
#: features of x86-64 that have another name in Linux
_LINUX = {
    "sse3": "pni", "sse4.1": "sse4_1", "sse4.2": "sse4_2", "bmi": "bmi1", "lzcnt": "abm", "sahf": "lahf_lm",
    "avx512vnni": "avx512_vnni", "avxvnni": "avx_vnni", "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16",
}  # fmt: skip
#: for aarch64, by feature: (word, bit) in HWCAP and HWCAP2
_ARM = {"fp16": (0, 10), "dotprod": (0, 20)}


#: LLVM 22 rounds numbers to integers in place with SSE (cvtps2dq), as if each address was a multiple of 16 bytes. The
#: same rounding by its other name is a separate instruction.
_ROUNDING = ("-D__builtin_rintf=__builtin_roundevenf",)


@dataclass(frozen=True)
class Level:
    """A set of features that kernels may use."""

    name: str
    #: features that every processor of this level has
    features: tuple[str, ...]
    #: bytes of a vector register, and the number of registers
    vector_bytes: int
    registers: int
    #: optional features that kernels use if a processor has them
    extras: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name with the extras, as in a record's key."""
        return "+".join((self.name, *self.extras))

    @property
    def flags(self) -> list[str]:
        """The flags for clang, which name every feature."""
        if self.name.startswith("armv8"):
            return ["-march=" + "+".join(("armv8.2-a" if "dotprod" in self.extras else "armv8-a", *self.extras))]
        # For some processors LLVM prefers to use half of each 512-bit register.
        wide = [f"-mprefer-vector-width={8 * self.vector_bytes}"]
        has = [f"-m{feature}" for feature in (*self.features, *self.extras)]
        return ["-march=x86-64", *wide, *has, *([] if "avx" in self.features else _ROUNDING)]


_V2 = ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16", "sahf")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
#: from the lowest to the highest
LEVELS = {
    "x86_64": (
        Level("x86-64", (), 16, 16),
        Level("x86-64-v2", _V2, 16, 16),
        Level("x86-64-v3", _V3, 32, 16, ("avxvnni",)),
        Level("x86-64-v4", _V4, 64, 32, ("avx512vnni",)),
    ),
    "aarch64": (Level("armv8-a", (), 16, 32, ("fp16", "dotprod")),),
}


def machine() -> str:
    """Return the architecture of this process, by Linux's name."""
    found = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(found, found)


def features(words: Sequence[int], architecture: str) -> frozenset[str]:
    """Return the features of a processor from the words of `processor_features`."""
    if architecture != "x86_64":
        return frozenset(name for name, (at, bit) in _ARM.items() if words[at] >> bit & 1)
    saved = words[13]
    found = {n for n, (at, bit, needs) in _X86.items() if words[at] >> bit & 1 and saved & needs == needs}
    return frozenset(found)


def named(flags: frozenset[str]) -> frozenset[str]:
    """Return the likely features of an x86-64 processor from its flags in Linux."""
    return frozenset(name for name in _X86 if _LINUX.get(name, name) in flags)


def family_model(signature: int) -> tuple[int, int]:
    """Return family and model of an x86-64 processor from eax of CPUID's leaf 1."""
    family, model = signature >> 8 & 15, signature >> 4 & 15
    if family in (6, 15):
        model |= (signature >> 16 & 15) << 4
    return (family + (signature >> 20 & 255) if family == 15 else family), model


def executable(found: frozenset[str], architecture: str) -> list[Level]:
    """Return the levels that a processor can execute, the lowest first, each with the extras that it has."""
    levels = [level for level in LEVELS.get(architecture, ()) if found.issuperset(level.features)]
    return [replace(level, extras=tuple(e for e in level.extras if e in found)) for level in levels]
