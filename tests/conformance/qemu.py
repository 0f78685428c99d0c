"""A processor of another kind as a device: each kernel is a static program that an emulator runs, launch by launch.

The compiler of the ``ziglang`` wheel brings a C library for it. Programs are kept in the kernel cache.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from conformance import strict
from conformance.elsewhere import Elsewhere, ImmediateQueue, Region, Word
from tunewright.devices import kernel_cache
from tunewright.devices.base import Queue, Target
from tunewright.devices.c_device import CDevice, CQueue
from tunewright.devices.native import compiler, isa
from tunewright.devices.native.programs import name_of
from tunewright.errors import DeviceError, ExecutionError

LEVEL = isa.LEVELS["aarch64"][0]
TRIPLE = "aarch64-linux-musl"
#: of Debian's packages qemu-user and qemu-user-static
EMULATOR = next(filter(shutil.which, ("qemu-aarch64", "qemu-aarch64-static")), "qemu-aarch64")
#: as kernels for this machine are compiled
FLAGS = (*(flag for flag in compiler.FLAGS if flag != "-fPIC"), *LEVEL.flags)
HARNESS = Path(__file__).with_suffix(".c")
#: seconds that a launch may take
PATIENCE = 120


def why_not() -> str:
    """Why there is no such device here; empty: there is one."""
    if shutil.which(EMULATOR) is None:
        return f"{EMULATOR} is not installed (on Debian: the package qemu-user)"
    return "" if _zig() is not None else "the package ziglang is not installed, which brings a C library"


class QemuDevice(CDevice):
    """An aarch64 processor. Its memory is the host's."""

    family = "qemu"
    dialect = "c"

    @classmethod
    def available(cls) -> list[str] | str:
        return why_not() or ["CPU.QEMU"]

    def __init__(self, name: str = "CPU.QEMU") -> None:
        self.name = name
        self.target = Target(
            "cpu", "emulated", LEVEL.title, 2, (("runtime", "native"),), "c", " ".join(FLAGS), LEVEL.vector_bytes,
            LEVEL.registers,
        )  # fmt: skip
        self.programs: dict[str, bytes] = {}

    def queue(self) -> ImmediateQueue:
        return ImmediateQueue()

    def build(self, source: str) -> tuple[str, bytes]:
        """The text, and its program."""
        if source not in self.programs:
            harness = HARNESS.read_text("utf-8")
            key = {"emulated": TRIPLE, "flags": " ".join(FLAGS), "harness": harness, "source": source}
            stored = kernel_cache.current()
            found = stored.get(key) if stored is not None else None
            self.programs[source] = found["program"] if found is not None else _compile(source)
            if found is None and stored is not None:
                stored.put(key, {"program": self.programs[source]}, f"{TRIPLE}: {name_of(source)}")
        return source, self.programs[source]

    def launch(
        self, queue: Queue, program: Any, name: str, grid: Sequence[int], local: Sequence[int] = ()
    ) -> Emulated:  # fmt: skip
        assert isinstance(queue, CQueue)
        return Emulated(queue, name, program[0], grid, program[1])


class Emulated(Elsewhere):
    """One run of a program."""

    def __init__(self, queue: CQueue, name: str, source: str, grid: Sequence[int], program: bytes) -> None:
        super().__init__(queue, name, source, grid)
        self.program = program

    def run(self, regions: Sequence[Region], words: Sequence[Word]) -> None:
        items, sizes = math.prod(self.grid), [region.data.size for region in regions]
        given = [n for w in words for n in (_kind(w), w.value)]
        numbers = [items, *self.grid[:2], len(words), len(regions), *sizes, *given]
        head = b"".join((n & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little") for n in numbers)
        made = subprocess.run(
            [EMULATOR, _file(self.program)], input=head + b"".join(region.data.tobytes() for region in regions),
            capture_output=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        if made.returncode or len(made.stdout) != sum(sizes):
            code = -made.returncode if made.returncode < 0 else made.returncode - 128
            ended = signal.Signals(code).name if code in set(signal.Signals) else f"exit status {made.returncode}"
            raise AssertionError(f"{self.name}: {ended} {made.stderr.decode('utf-8', 'replace').strip()}")
        at = 0
        for region, size in zip(regions, sizes, strict=True):
            region.data[:] = np.frombuffer(made.stdout, np.uint8, size, at)
            at += size


def _kind(word: Word) -> int:
    return -2 if word.is_empty else -1 if word.region is None else word.region


@cache
def _zig() -> str | None:
    try:
        found = compiler.find().compile[0]
    except DeviceError:
        return None
    return found if Path(found).name.startswith("zig") else None


@cache
def _folder() -> Path:
    """Of this process, removed when it ends."""
    folder = tempfile.TemporaryDirectory(prefix="tunewright-qemu-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _file(program: bytes) -> str:
    path = _folder() / hashlib.sha256(program).hexdigest()
    if not path.exists():
        path.touch(0o700)
        path.write_bytes(program)
    return str(path)


def compile_program(text: Path, program: Path, *more: str) -> None:
    """A program with a C library."""
    _run("cc", "-target", TRIPLE, "-O2", "-static", "-Wall", "-Wextra", "-Werror", *more, text, "-o", program)


def _compile(source: str) -> bytes:
    with tempfile.TemporaryDirectory(dir=_folder()) as here:
        text, made, program = (Path(here) / name for name in ("kernel.c", "kernel.o", "program"))
        text.write_text(source, "utf-8")
        _object(text, made, f"-D{name_of(source)}=kernel_entry")
        try:
            _run("ld.lld", "-static", "-s", _harness(), made, "-o", program)
        except ExecutionError:  # mathematics of double precision: the library for it takes a minute to compile, once
            _run("cc", "-target", TRIPLE, "-O2", "-static", "-s", _harness(), made, "-o", program)
        return program.read_bytes()


@cache
def _harness() -> Path:
    made = _folder() / "harness.o"
    _object(HARNESS, made)
    return made


def _object(text: Path, made: Path, *more: str) -> None:
    _run("clang", f"--target={TRIPLE}", *FLAGS, *strict.WARNINGS, *more, "-c", text, "-o", made)


def _run(*arguments: str | Path) -> None:
    """A command of zig; its C library is compiled once, for all processes."""
    zig = _zig()
    assert zig is not None
    kept = kernel_cache.current()
    cache_ = _folder() if kept is None else kept.folder.parent / "zig"
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(cache_), "ZIG_LOCAL_CACHE_DIR": str(_folder() / "zig")}
    done = subprocess.run([zig, *arguments], capture_output=True, text=True, env={**os.environ, **caches}, check=False)
    if done.returncode:
        raise ExecutionError(f"{' '.join(map(str, arguments[:3]))}: {done.stderr[:2000]}")
