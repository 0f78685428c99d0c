"""Clang: out of the ``ziglang`` wheel, from PATH, or the one that CPU_COMPILER names."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...errors import DeviceError, ExecutionError, SettingsError
from .. import building
from . import isa

#: the oldest clang that knows everything that kernels use
OLDEST = 15
#: the newest that is looked for by its number
_NEWEST = 39
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
        with _folder(label) as folder:
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


@contextlib.contextmanager
def _folder(label: str) -> Iterator[str]:
    """A folder to compile in. ExecutionError where files cannot be written."""
    try:
        with tempfile.TemporaryDirectory(prefix="tunewright-") as folder:
            yield folder
    except OSError as error:
        raise ExecutionError(f"compiling {label} needs temporary files, which cannot be written: {error}",
                             hint="TMPDIR may name another folder") from None  # fmt: skip


@cache
def find(named: str = "") -> Compiler:
    """The compiler to use; ``named``: what CPU_COMPILER says, of which a mistake is a SettingsError. DeviceError when
    there is none."""
    if named:
        path = shutil.which(named)
        if path is None:
            raise SettingsError(f"there is no program {named!r}", where="CPU_COMPILER",
                                hint="name a clang, or unset it")  # fmt: skip
        made = _zig(Path(path)) if Path(path).name.startswith("zig") else _clang(path)
        if isinstance(made, str):
            raise SettingsError(made, where="CPU_COMPILER", hint=f"name a clang {OLDEST} or newer, or unset it")
        return made
    zig = _zig_of_wheel()
    made = _zig(zig) if zig is not None else ""
    if isinstance(made, Compiler):
        return made
    why = made or "there is no C compiler"
    for name in ("clang", *(f"clang-{number}" for number in range(_NEWEST, OLDEST - 1, -1))):
        path = shutil.which(name)
        made = why if path is None else _clang(path)
        if isinstance(made, Compiler):
            return made
        why = made
    raise DeviceError(why, hint=REMEDY)


def _zig_of_wheel() -> Path | None:
    spec = importlib.util.find_spec("ziglang")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder) / "zig"
        if os.access(path, os.X_OK):
            return path
    return None


def _zig(path: Path) -> Compiler | str:
    """Zig's binary is clang and lld as well; called so, it needs neither a home folder nor a cache."""
    try:
        version = importlib.metadata.version("ziglang") if _zig_of_wheel() == path else _said(str(path), "version")
    except importlib.metadata.PackageNotFoundError:  # a folder without its metadata
        version = _said(str(path), "version")
    if not version[:1].isdigit():
        return f"{path} is not zig"
    target = f"--target={_TARGETS[isa.machine()]}"
    link = (str(path), "ld.lld", "-shared", *_LINKING)
    return Compiler((str(path), "clang", target), link, f"zig {version}", _identity(path))


def _clang(path: str) -> Compiler | str:
    """The clang at a path, or why it will not do."""
    said = _said(path, "--version")
    found = re.search(r"clang version (\d+)[\w.]*", said)
    if found is None:
        return f"{path} is not clang"
    if int(found[1]) < OLDEST:
        return f"{path} is {found[0]}, which is too old"
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
