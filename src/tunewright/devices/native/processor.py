"""What this processor is. The pool and CPUID are compiled to find out, for any processor of the architecture."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ...errors import DeviceError, ExecutionError, SettingsError
from ...settings import Settings
from .. import kernel_cache
from ..host import cache_sizes, cpu_name
from . import compiler, isa
from .compiler import Compiler
from .isa import Level
from .objects import Loaded, file_of, private_file
from .programs import Programs

_HERE = Path(__file__).parent
#: words that `processor_features` fills in
_WORDS = 14
#: what a level must be able to do, in a text that its instructions are all over
_PROBE = """
typedef float V __attribute__((vector_size({bytes}), aligned(4)));
__attribute__((visibility("default"))) void probe(const float* x, const float* y, float* z, int n) {{
  for (int i = 0; i < n; i += {lanes}) *(V*)(z + i) = *(const V*)(x + i) * *(const V*)(y + i) + *(const V*)(x + i);
}}
"""
#: runs it in a process of its own: arguments are the object's file and how many numbers
_RUN = """
import ctypes, sys
a = ctypes.c_float * {count}
x, y, z = a(*range({count})), a(*range(1, {count} + 1)), a()
ctypes.CDLL(sys.argv[1]).probe(x, y, z, {count})
sys.exit(0 if list(z) == [i * (i + 2) for i in range({count})] else 3)
"""
_COUNT = 64


@dataclass(frozen=True)
class Processor:
    """The processor, and the levels that it executes, the lowest first."""

    name: str
    levels: tuple[Level, ...]
    runtime: Loaded

    def level(self, wanted: str) -> Level:
        """The level that CPU_ISA names; AUTO: the highest one."""
        if wanted == "AUTO":
            return self.levels[-1]
        found = next((level for level in self.levels if level.name.upper() == wanted), None)
        if found is None:
            has = ", ".join(level.name for level in self.levels)
            raise SettingsError(f"this processor does not execute {wanted.lower()}", where="CPU_ISA",
                                hint=f"it executes {has}")  # fmt: skip
        return found


@cache
def find_compiler(named: str = "") -> Compiler | None:
    """The compiler, or none: then what is in the cache still runs."""
    try:
        return compiler.find(named)
    except DeviceError:
        if named:
            raise
        return None


@cache
def processor() -> Processor:
    """This one. DeviceError where nothing can be compiled for it or run on it."""
    architecture = isa.machine()
    if sys.platform != "linux":
        raise DeviceError(f"the thread pool needs Linux, this is {sys.platform}",
                          hint="CPU.INTEL (pip install tunewright[opencl]) or CPU.HOST runs here")  # fmt: skip
    if architecture not in isa.LEVELS:
        raise DeviceError(f"there are no kernels for {architecture}", hint="CPU.HOST runs here")
    found = find_compiler(Settings.from_environment().cpu_compiler)
    text = (_HERE / "pool.c").read_text("utf-8") + (_HERE / "processor.c").read_text("utf-8")
    try:
        runtime = Programs(["-DRUNTIME"], found, "thread pool").build(text).loaded
    except ExecutionError as error:
        if found is None:
            raise _without_compiler() from None
        raise DeviceError(error.what, hint=error.hint) from None
    words = np.zeros(_WORDS, np.uint64)
    runtime.library.processor_features(ctypes.c_void_p(words.ctypes.data))
    features = isa.features([int(word) for word in words], architecture)
    levels = isa.executable(features, architecture)
    return Processor(_name(int(words[0]), architecture), tuple(levels), runtime)


def _without_compiler() -> DeviceError:
    try:
        compiler.find()
    except DeviceError as error:
        return DeviceError(f"{error.what}, and nothing that was compiled is in the cache", hint=error.hint)
    return DeviceError("the C compiler is gone")


@cache
def why_not(level: Level, named: str) -> str:
    """Why kernels of a level do not run right here; empty: they do.

    A process of its own tries, once: an instruction that the processor turns out not to have ends that one.
    """
    text = _PROBE.format(bytes=level.vector_bytes, lanes=level.vector_bytes // 4)
    try:
        program = Programs([*level.flags, "-Wno-everything"], find_compiler(named), "probe").build(text)
    except ExecutionError as error:
        return error.what + (f" ({error.hint})" if error.hint else "")
    cache_ = kernel_cache.current()
    digest = hashlib.sha256(program.binary).hexdigest()
    verdict = {"probe": digest, "processor": cpu_name(), "kernel": platform.release()}
    if cache_ is not None and cache_.peek(verdict) is not None:
        return ""
    said = _try(program.binary)
    if not said and cache_ is not None:
        cache_.put(verdict, {"verdict": b"right"}, "probe: what this processor was seen to run right")
    return said and f"kernels for {level.title} do not run right here: {said}"


def _try(binary: bytes) -> str:
    """What goes wrong when a process of its own runs the probe; empty: nothing."""
    said = ""
    for opened in (file_of, private_file):
        try:
            with opened(binary, "probe") as (path, handles):
                said = _ends(path, handles)
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        if "cannot open shared object" not in said and "failed to map segment" not in said and "Errno" not in said:
            break  # else the system has no such files, or runs no code from them
    return said


def _ends(path: str, handles: tuple[int, ...]) -> str:
    """What a process says that runs the probe."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _RUN.format(count=_COUNT), path], pass_fds=handles, capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip
    if done.returncode < 0:
        return f"it ended with {signal.Signals(-done.returncode).name}"
    if done.returncode == 3:
        return "its results are wrong"
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return (lines or ["it failed"])[-1] if done.returncode else ""


def _name(signature: int, architecture: str) -> str:
    """Its own name is not enough: "AMD EPYC" is what very different ones are called."""
    known = [cpu_name()]
    if architecture == "x86_64":
        family, model = isa.family_model(signature)
        known.append(f"family {family} model {model}")
    known += [f"L{level} {size >> 10} KiB" for level, size in sorted(cache_sizes().items())]
    return ", ".join(known)
