"""Clang: out of the ``ziglang`` wheel, from PATH, or the one that CPU_COMPILER names."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...errors import DeviceError, ExecutionError
from .. import building
from . import isa

#: the oldest clang that knows everything that kernels use
OLDEST = 15
#: what to do where there is no compiler
REMEDY = "install one: pip install ziglang (or clang 15 or newer, or name one with CPU_COMPILER)"
#: Looking for stores that nobody reads took half of the time of a convolution, and found the same ones.
_QUICK = ("-mllvm", "-dse-memoryssa-walklimit=10")
#: for every text. Results are compared with references of their own arithmetic, so nothing changes values (denormals
#: count as zero, in the pool). Kernels ask for reassociation where they sum. -O2 is slower by up to 17 %.
FLAGS = (
    "-O3", "-std=gnu17", "-fPIC", "-ffreestanding", "-ffp-contract=on", "-fno-math-errno", "-fno-trapping-math",
    "-fdenormal-fp-math=preserve-sign", "-fvisibility=hidden", "-fno-stack-protector", "-fno-asynchronous-unwind-tables",
    *_QUICK,
)  # fmt: skip
#: warnings are errors where the compiler would otherwise make something else of a text
STRICT = ("-w", "-Werror=unused-value", "-Werror=implicit-function-declaration")
#: instead of C's own: for OpenCL C, whose types and functions are in the text. Kernels are given tensors that begin at
#: any number, so vectors need not begin where vectors do.
OPENCL_C_FLAGS = (
    "-cl-std=CL1.2", "-cl-no-stdinc", "-Xclang", "-cl-ext=+cl_khr_fp64", "-fsigned-char", "-fmax-type-align=8", "-w",
)  # fmt: skip
#: how a text in OpenCL C begins, and what stands between it and the C that runs it
OPENCL_C, OPENCL_C_LOOP = "/* OpenCL C */", "/* ---- C that runs it ---- */"
#: seconds that one text may take
PATIENCE = 300
#: for the linker
_LINKING = ("--hash-style=gnu", "--build-id=sha1")
_TARGETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}


@dataclass(frozen=True)
class Compiler:
    """Two commands, and what they are."""

    compile: tuple[str, ...]
    #: makes a shared object
    link: tuple[str, ...]
    #: product and version: a soft field of keys
    version: str
    #: the file that is run: where it changes, nothing that was compiled is taken for its work
    identity: str

    def build(self, text: str, flags: Sequence[str], label: str = "kernel") -> bytes:
        """The shared object of a text, in C or in OpenCL C. ExecutionError says what the compiler says."""
        with tempfile.TemporaryDirectory(prefix="tunewright-") as folder:
            source, made, shared = (os.path.join(folder, name) for name in ("kernel.c", "kernel.o", "kernel.so"))
            flags = [*flags]
            if text.startswith(OPENCL_C):
                bitcode = os.path.join(folder, "kernel.bc")
                kernel, _, text = text.rpartition(OPENCL_C_LOOP)
                self._bitcode(kernel, flags, bitcode, label)
                flags += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", bitcode]
            Path(source).write_text(text, encoding="utf-8")
            self._run([*self.compile, "-x", "c", *FLAGS, *flags, "-c", source, "-o", made], label)
            self._run([*self.link, made, "-o", shared], label)
            return Path(shared).read_bytes()

    def _bitcode(self, text: str, flags: Sequence[str], made: str, label: str) -> None:
        """Write what clang makes of OpenCL C before it optimises anything."""
        source = made.replace(".bc", ".cl")
        Path(source).write_text(text, encoding="utf-8")
        of_both = [flag for flag in (*FLAGS, *flags) if not flag.startswith(("-std=", "-Werror="))]
        how = ["-Xclang", "-disable-llvm-passes", "-emit-llvm"]
        self._run([*self.compile, "-x", "cl", *of_both, *OPENCL_C_FLAGS, *how, "-c", source, "-o", made], label)

    def _run(self, command: list[str], label: str) -> None:
        try:
            # Its own session: Ctrl-C is this process's to handle.
            with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  start_new_session=True) as process:  # fmt: skip
                building.settle(process.pid, building.current().gpu_host_task_priority)
                try:
                    said, _ = process.communicate(timeout=PATIENCE)
                except BaseException:
                    process.kill()
                    raise
        except subprocess.TimeoutExpired:
            raise ExecutionError(f"compiling {label} took more than {PATIENCE} s") from None
        except OSError as error:
            raise ExecutionError(f"the compiler {command[0]} cannot be run: {error.strerror or error}") from None
        if process.returncode:
            text = said.decode("utf-8", "replace").strip()
            raise ExecutionError(f"{self.version} cannot compile {label}: {text[:2000] or process.returncode}")


@cache
def find(named: str = "") -> Compiler:
    """The compiler to use; ``named``: what CPU_COMPILER says. DeviceError when there is none."""
    if named:
        path = shutil.which(named)
        if path is None:
            raise DeviceError(f"there is no program {named!r}", where="CPU_COMPILER", hint="name a clang, or unset it")
        return _zig(Path(path)) if Path(path).name.startswith("zig") else _clang(path, "CPU_COMPILER")
    zig = _zig_of_wheel()
    if zig is not None:
        return _zig(zig)
    path = shutil.which("clang")
    if path is not None:
        return _clang(path)
    raise DeviceError("there is no C compiler", hint=REMEDY)


def _zig_of_wheel() -> Path | None:
    spec = importlib.util.find_spec("ziglang")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder) / "zig"
        if os.access(path, os.X_OK):
            return path
    return None


def _zig(path: Path) -> Compiler:
    """Zig's binary is clang and lld as well; called so, it needs neither a home folder nor a cache."""
    try:
        version = importlib.metadata.version("ziglang") if _zig_of_wheel() == path else _said(str(path), "version")
    except importlib.metadata.PackageNotFoundError:  # a folder without its metadata
        version = _said(str(path), "version")
    target = f"--target={_TARGETS[isa.machine()]}"
    link = (str(path), "ld.lld", "-shared", *_LINKING)
    return Compiler((str(path), "clang", target), link, f"zig {version}", _identity(path))


def _clang(path: str, where: str = "PATH") -> Compiler:
    said = _said(path, "--version")
    found = re.search(r"clang version (\d+)[\w.]*", said)
    if found is None:
        raise DeviceError(f"{path} is not clang", where=where, hint=REMEDY)
    if int(found[1]) < OLDEST:
        raise DeviceError(f"{path} is {found[0]}, which is too old", where=where, hint=REMEDY)
    link = (path, "-nostdlib", "-shared", *(f"-Wl,{option}" for option in _LINKING))
    return Compiler((path,), link, found[0].replace(" version", ""), _identity(Path(path)))


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _identity(path: Path) -> str:
    about = path.resolve().stat()
    return f"{path.name} {about.st_size} {about.st_mtime_ns}"
