"""Detects this processor, with code that is compiled for any processor of the architecture."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import platform
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from tunewright.errors import DeviceError, ExecutionError, SettingsError, TunewrightError
from tunewright.settings import Settings

from .. import kernel_cache
from ..host import cache_sizes, cpu_flags, cpu_name
from ..kernel_cache import KernelCache
from . import compiler, isa
from .compiler import FLAGS, ClangCommands, ended
from .isa import Level
from .objects import SharedObject, file_of, places
from .programs import NativePrograms

_HERE = Path(__file__).parent
#: texts of the thread pool and its helpers, and the text that identifies the processor
POOL, FEATURES = ("launch_table.c", "pool.c", "formulas.c"), "processor.c"
#: number of words that `processor_features` fills in
_WORDS = 14
#: the compiler of the probe, in a remembered verdict
_COMPILER = "compiler"
#: A program without libraries. It multiplies vectors, then executes an instruction of each feature that the products do
#: not use anyway. It ends with status 0 if the products are right.
_PROBE = """
typedef float V __attribute__((vector_size({bytes}), aligned(4)));
static void multiply(const float* x, const float* y, float* z) {{
  for (int i = 0; i < 64; i += {lanes}) *(V*)(z + i) = *(const V*)(x + i) * *(const V*)(y + i) + *(const V*)(x + i);
}}
__attribute__((used)) static int probe(void) {{
  volatile float x[64], y[64], z[64];
  for (int i = 0; i < 64; i++) {{ x[i] = i; y[i] = i + 1; z[i] = 0; }}
  multiply((float*)x, (float*)y, (float*)z);
  {instructions}
  for (int i = 0; i < 64; i++) if (z[i] != i * (i + 2.0f)) return 3;
  return 0;
}}
{start}
"""
#: calls `probe`, and ends the process with its result
_START = {
    "x86_64": "call probe; mov %eax, %edi; mov $231, %eax; syscall", "aarch64": "bl probe; mov x8, #94; svc #0",
}  # fmt: skip
#: an instruction of each feature; one clobber list covers their registers
_INSTRUCTIONS = {
    "sse3": "addsubps %xmm1, %xmm0", "ssse3": "pshufb %xmm1, %xmm0", "sse4.1": "pmulld %xmm1, %xmm0",
    "sse4.2": "pcmpgtq %xmm1, %xmm0", "popcnt": "popcnt %eax, %eax", "avx": "vaddps %ymm1, %ymm1, %ymm0",
    "avx2": "vpaddd %ymm1, %ymm1, %ymm0", "bmi": "andn %eax, %eax, %eax", "bmi2": "mulx %rax, %rax, %rax",
    "f16c": "vcvtph2ps %xmm1, %ymm0", "fma": "vfmadd231ps %ymm1, %ymm1, %ymm0", "lzcnt": "lzcnt %eax, %eax",
    "avxvnni": "{vex} vpdpbusd %ymm1, %ymm1, %ymm0", "avx512f": "vaddps %zmm1, %zmm1, %zmm0",
    "avx512bw": "vpaddw %zmm1, %zmm1, %zmm0", "avx512cd": "vplzcntd %zmm1, %zmm0",
    "avx512dq": "vpmullq %zmm1, %zmm1, %zmm0", "avx512vl": "vpternlogd $1, %ymm1, %ymm1, %ymm0",
    "avx512vnni": "vpdpbusd %zmm1, %zmm1, %zmm0", "dotprod": "udot v0.4s, v1.16b, v1.16b",
    "fp16": "fadd v0.8h, v1.8h, v1.8h",
}  # fmt: skip
_CLOBBERED = {"x86_64": '"rax", "rdx", "xmm0", "cc"', "aarch64": '"v0", "cc"'}


@dataclass(frozen=True)
class Processor:
    """The processor, and the levels that it can execute, the lowest first."""

    name: str
    levels: tuple[Level, ...]

    def level(self, wanted: str) -> Level:
        """Return the level that CPU_ISA names. AUTO: the highest one."""
        if wanted == "AUTO":
            return self.levels[-1]
        found = next((level for level in self.levels if level.name.upper() == wanted), None)
        if found is None:
            has = ", ".join(level.name for level in self.levels)
            raise SettingsError(f"this processor does not execute {wanted.lower()}", where="CPU_ISA",
                                hint=f"it executes {has}")  # fmt: skip
        return found


@cache
def find_compiler(named: str = "") -> ClangCommands | None:
    """Return the compiler, or None. Without one, programs of the cache still run."""
    try:
        return compiler.find(named)
    except DeviceError:
        return None


@cache
def processor() -> Processor:
    """Return this processor. Raise DeviceError if nothing can be compiled for it or run on it."""
    architecture = isa.machine()
    if sys.platform != "linux":
        raise DeviceError(f"the thread pool needs Linux, this is {sys.platform}", hint="CPU.HOST runs here")
    if architecture not in isa.LEVELS:
        raise DeviceError(f"there are no kernels for {architecture}", hint="CPU.HOST runs here")
    begin()
    if find_compiler(Settings.from_environment().cpu_compiler) is None:
        thread_pool()  # what is missing now cannot be made later
    told = _loaded(_text(FEATURES))
    words = np.zeros(_WORDS, np.uint64)
    told.library.processor_features(ctypes.c_void_p(words.ctypes.data))
    features = isa.features([int(word) for word in words], architecture)
    levels = isa.executable(features, architecture)
    return Processor(_name(int(words[0]), architecture), tuple(levels))


def thread_pool() -> SharedObject:
    """Return the thread pool in C (`pool`), which takes longer to compile than most kernels. Raise DeviceError without
    it."""
    return _loaded(_text(*POOL))


@cache
def begin() -> None:
    """Begin to compile what `processor`, `why_not` and `thread_pool` need, in parallel with the work that precedes
    them."""
    settings = Settings.from_environment()
    named, wanted = settings.cpu_compiler, settings.cpu_isa
    # An error is met again by the call that needs the result. RuntimeError: no further thread can be started.
    with contextlib.suppress(TunewrightError, OSError, RuntimeError):
        if sys.platform != "linux" or isa.machine() not in isa.LEVELS or find_compiler(named) is None:
            return
        with _kept():
            if not _runtime().begin(_text(FEATURES)):  # then it is also unknown whether kernels run here
                likely = isa.executable(isa.named(cpu_flags()), isa.machine())
                for level in [level for level in likely if wanted in ("AUTO", level.name.upper())][-1:]:
                    _prober(level, named).begin(probe(level))
            if not _runtime().begin(_text(*POOL)):
                # Not a daemon: the process ends without leaving files or compilers behind
                threading.Thread(target=_finish, name="compiles-pool").start()


def _finish() -> None:
    with contextlib.suppress(TunewrightError, OSError):  # a call that needs the pool meets the error again
        thread_pool()


@cache
def _text(*names: str) -> str:
    return "".join((_HERE / name).read_text("utf-8") for name in names)


@cache
def _runtime() -> NativePrograms:
    """Return the programs compiled for any processor of the architecture."""
    return NativePrograms(["-DRUNTIME"], find_compiler(Settings.from_environment().cpu_compiler), "thread pool")


@lru_cache(8)
def _prober(level: Level, named: str) -> NativePrograms:
    return NativePrograms([*level.flags, "-Wno-everything"], find_compiler(named), "probe", entry="start")


def _kept() -> contextlib.AbstractContextManager[None]:
    """Store compiled programs where the environment first said, whichever model needs them."""
    return kernel_cache.using(_place())


@cache
def _place() -> KernelCache | None:
    return KernelCache.of(Settings.from_environment())


def _loaded(text: str) -> SharedObject:
    try:
        with _kept():
            return _runtime().build(text).loaded
    except ExecutionError as error:
        if find_compiler(Settings.from_environment().cpu_compiler) is None:
            raise _without_compiler() from None
        raise DeviceError(error.what, hint=error.hint) from None


def _without_compiler() -> DeviceError:
    try:
        compiler.find()
    except DeviceError as error:
        return DeviceError(f"{error.what}, and nothing that was compiled is in the cache", hint=error.hint)
    return DeviceError("a C compiler appeared after this process had looked for one", hint="start again")


@cache
def why_not(level: Level, named: str) -> str:
    """Return why kernels of a level do not run right here; empty: they do.

    A separate process tries once. An instruction that the processor lacks ends only that process.
    """
    text, found, remembered = probe(level), find_compiler(named), kernel_cache.current()
    verdict = {
        "probe": hashlib.sha256(" ".join((*FLAGS, *level.flags, text)).encode()).hexdigest(),
        "processor": processor().name, "kernel": platform.release(),
    }  # fmt: skip
    known = None if remembered is None else remembered.peek(verdict)
    if known is not None and (found is None or known.get(_COMPILER) == found.identity.encode()):
        return ""
    try:
        program = _prober(level, named).build(text)
    except (ExecutionError, DeviceError) as error:
        return error.what + (f" ({error.hint})" if error.hint else "")
    said = run(program.binary)
    if said:
        return f"kernels for {level.title} do not run right here: {said}"
    if remembered is not None and found is not None:
        label = "probe: what this processor was seen to run right"
        remembered.put(verdict, {_COMPILER: found.identity.encode()}, label)
    return ""


def probe(level: Level) -> str:
    """Return the text of a program that tries a level."""
    clobbered, escaped = _CLOBBERED[isa.machine()], str.maketrans({sign: f"%{sign}" for sign in "%{}"})
    tried = [_INSTRUCTIONS[f].translate(escaped) for f in (*level.features, *level.extras) if f in _INSTRUCTIONS]
    return _PROBE.format(
        bytes=level.vector_bytes, lanes=level.vector_bytes // 4,
        instructions="\n  ".join(f'__asm__ volatile("{text}" : : : {clobbered});' for text in tried),
        start=f'__asm__(".text; .globl start; start: {_START[isa.machine()]}");',
    )  # fmt: skip


def run(binary: bytes) -> str:
    """Run a program in a separate process and return what goes wrong; empty: nothing."""
    failed = ""
    for place in places():
        try:
            with file_of(binary, "probe", place) as (path, handles):
                done = subprocess.run(
                    [path], pass_fds=handles, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
                )
        except subprocess.TimeoutExpired:
            return "it does not end"
        except OSError as error:  # programs cannot be run from there
            failed = f"no program can be run here: {error}"
            continue
        if done.returncode == 3:
            return "its results are wrong"
        return ended(done.returncode) if done.returncode else ""
    return failed


def _name(signature: int, architecture: str) -> str:
    """Return a name that is more specific than the processor's own: very different ones are called "AMD EPYC"."""
    known = [cpu_name()]
    if architecture == "x86_64":
        family, model = isa.family_model(signature)
        known.append(f"family {family} model {model}")
    known += [f"L{level} {size >> 10} KiB" for level, size in sorted(cache_sizes().items())]
    return ", ".join(known)
