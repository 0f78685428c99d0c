"""Clang: out of the ``ziglang`` wheel, from PATH, or the one that CPU_COMPILER names."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tunewright.errors import DeviceError, ExecutionError, SettingsError

from .. import build_options
from . import isa

#: the oldest clang that knows everything that kernels use
OLDEST = 15
#: names that are looked for on PATH go as far
NEWEST = 40
#: what to do where there is no compiler
REMEDY = "install one: pip install ziglang (or clang 15 or newer, or name one with CPU_COMPILER)"
#: Looking for stores that nobody reads took half of the time of a convolution, and found the same ones.
_QUICK = ("-mllvm", "-dse-memoryssa-walklimit=10")
#: for every text. Results are compared with references of their own arithmetic, so nothing changes values (denormals
#: count as zero, in the pool). Kernels ask for reassociation where they sum. -O2 is slower by up to 17 %.
FLAGS = (
    "-O3", "-std=gnu17", "-fPIC", "-ffreestanding", "-ffp-contract=on", "-fno-math-errno", "-fno-trapping-math",
    "-fdenormal-fp-math=preserve-sign", "-fvisibility=hidden", "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables", *_QUICK,
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
#: where temporary files can be without a disk
_MEMORY = "/dev/shm"
_NO_SPACE, _ELF = "No space left on device", b"\x7fELF"
#: for the linker
_LINKING = ("--hash-style=gnu", "--build-id=sha1")
_TARGETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}


@dataclass(frozen=True)
class ClangCommands:
    """Two commands, and what they are."""

    compile: tuple[str, ...]
    #: makes a shared object
    link: tuple[str, ...]
    #: product and version: a soft field of keys
    version: str
    #: with the file that is run: where it changes, nothing that was compiled is taken for its work
    identity: str

    def build(self, text: str, flags: Sequence[str], label: str = "kernel", entry: str = "") -> bytes:
        """The shared object of a text, in C or in OpenCL C. ExecutionError says what the compiler says.

        ``entry``: the function where it begins when it is run as a program.
        """
        failed: OSError | None = None
        for parent in (None, _MEMORY):
            try:
                with tempfile.TemporaryDirectory(prefix="tunewright-", dir=parent) as folder:
                    return self._build(Path(folder), text, flags, label, entry)
            except OSError as error:  # no folder for temporary files, or a full disk
                failed = error
        raise ExecutionError(
            f"compiling {label} needs a folder for temporary files: {failed}", hint="TMPDIR names another one"
        )

    def _build(self, folder: Path, text: str, flags: Sequence[str], label: str, entry: str) -> bytes:
        source, made, shared = (folder / name for name in ("kernel.c", "kernel.o", "kernel.so"))
        flags = [*flags]
        if text.startswith(OPENCL_C):
            kernel, _, text = text.rpartition(OPENCL_C_LOOP)
            flags += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", self._bitcode(folder, kernel, flags, label)]
        source.write_text(text, encoding="utf-8")
        self._run([*self.compile, "-x", "c", *FLAGS, *flags, "-c", str(source), "-o", str(made)], label)
        begin = ["-e", entry] if entry else []
        self._run([*self.link, *begin, str(made), "-o", str(shared)], label)
        binary = shared.read_bytes() if shared.exists() else b""
        if not binary.startswith(_ELF):
            raise ExecutionError(f"{self.version} compiled {label} to a file that is not a shared object",
                                 hint="CPU_COMPILER names another compiler")  # fmt: skip
        return binary

    def _bitcode(self, folder: Path, text: str, flags: Sequence[str], label: str) -> str:
        """The file of what clang makes of OpenCL C before it optimises anything."""
        source, made = folder / "kernel.cl", folder / "kernel.bc"
        source.write_text(text, encoding="utf-8")
        of_both = [flag for flag in (*FLAGS, *flags) if not flag.startswith(("-std=", "-Werror="))]
        how = ["-Xclang", "-disable-llvm-passes", "-emit-llvm"]
        files = ["-c", str(source), "-o", str(made)]
        self._run([*self.compile, "-x", "cl", *of_both, *OPENCL_C_FLAGS, *how, *files], label)
        return str(made)

    def _run(self, command: list[str], label: str) -> None:
        apart = build_options.is_apart()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=apart,
            )  # fmt: skip
        except OSError as error:
            raise ExecutionError(f"the compiler {command[0]} cannot be run: {error.strerror or error}") from None
        with process:
            build_options.settle(process.pid, build_options.current().gpu_host_task_priority)
            try:
                said = _output(process, PATIENCE).decode("utf-8", "replace").strip()
            except subprocess.TimeoutExpired:
                raise ExecutionError(f"compiling {label} took more than {PATIENCE} s", hint=REMEDY) from None
            finally:
                if process.poll() is None and apart:  # with whatever a wrapper has started
                    os.killpg(process.pid, signal.SIGKILL)
                elif process.poll() is None:
                    process.kill()
        said = said.replace(f"{Path(command[-1]).parent}{os.sep}", "")  # reasons are kept, and the folder is not
        if process.returncode and _is_full(process.returncode, said):
            raise OSError(errno.ENOSPC, _NO_SPACE)
        if process.returncode:
            raise ExecutionError(f"{self.version} cannot compile {label}: {said[:2000] or ended(process.returncode)}")


def _is_full(code: int, said: str) -> bool:
    """Whether a compiler failed because of a full disk.

    Linkers write through mapped memory. Where the file has no room for a page they end with SIGBUS, in silence.
    """
    return code == -signal.SIGBUS or any(sign in said for sign in (_NO_SPACE, "Bus error"))


def _output(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """What a process says until it ends. TimeoutExpired where that takes longer.

    `Popen.communicate` looks from time to time whether it has ended: a compiler whose memory is still being freed then
    counts for milliseconds more, while the next one could begin.
    """
    assert process.stdout is not None
    deadline, handle, parts = time.monotonic() + seconds, process.stdout.fileno(), list[bytes]()
    while True:
        _await(handle, process, deadline)
        part = os.read(handle, 1 << 16)
        if not part:
            break
        parts.append(part)
    try:
        over = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # an old system, or one that does not let us
        process.wait(max(0.0, deadline - time.monotonic()))
        return b"".join(parts)
    try:
        _await(over, process, deadline)
    finally:
        os.close(over)
    process.wait()
    return b"".join(parts)


def _await(handle: int, process: subprocess.Popen[bytes], deadline: float) -> None:
    """Wait until there is something to read."""
    poll = select.poll()
    poll.register(handle, select.POLLIN | select.POLLHUP)
    if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
        raise subprocess.TimeoutExpired(process.args, deadline)


def ended(code: int) -> str:
    """How a process ended, from its exit status."""
    if code >= 0:
        return f"it ended with status {code}"
    try:
        return f"it ended with {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"it ended with signal {-code}"


@cache
def find(named: str = "") -> ClangCommands:
    """The compiler to use; DeviceError when there is none. ``named``: what CPU_COMPILER says; SettingsError when that
    will not do."""
    if named:
        path = shutil.which(named)
        try:
            if path is None:
                raise DeviceError(f"there is no program {named!r}")
            return _zig(Path(path)) if Path(path).name.startswith("zig") else _clang(path)
        except DeviceError as error:
            raise SettingsError(
                error.what, where="CPU_COMPILER", hint=f"name a clang, {OLDEST} or newer, or unset it"
            ) from None
    zig = _zig_of_wheel()
    if zig is not None:
        return _zig(zig)
    refused: DeviceError | None = None
    for name in ("clang", *(f"clang-{version}" for version in range(NEWEST, OLDEST - 1, -1))):
        path = shutil.which(name)
        if path is not None:
            try:
                return _clang(path)
            except DeviceError as error:  # too old, for example: there may be another one
                refused = refused or error
    raise refused or DeviceError("there is no C compiler", hint=REMEDY)


def _zig_of_wheel() -> Path | None:
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "zig"
        if os.access(path, os.X_OK):
            return path
    return None


def _zig(path: Path) -> ClangCommands:
    """Zig's binary is clang and lld as well; called so, it needs neither a home folder nor a cache."""
    version = _version_of_wheel(path.parent) if path == _zig_of_wheel() else ""
    version = version or _said(str(path), "version")
    if not re.match(r"\d+\.\d+", version):
        raise DeviceError(f"{path} is not zig", hint=REMEDY)
    target = f"--target={_TARGETS[isa.machine()]}"
    link = (str(path), "ld.lld", "-shared", "--threads=1", *_LINKING)  # its threads take longer to start than to link
    return ClangCommands((str(path), "clang", target), link, f"zig {version}", _identity(path, version))


def _version_of_wheel(package: Path) -> str:
    """The version of the package in a folder."""
    beside = [folder.name for folder in package.parent.glob("ziglang-*.dist-info")]
    if len(beside) == 1:
        return beside[0].removeprefix("ziglang-").removesuffix(".dist-info")
    import importlib.metadata  # takes long to import

    try:
        return importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError:  # a folder without its metadata
        return ""


def _clang(path: str) -> ClangCommands:
    said = _said(path, "--version")
    found = re.search(r"clang version (\d+)[\w.]*", said)
    if found is None:
        raise DeviceError(f"{path} is not clang", hint=REMEDY)
    if int(found[1]) < OLDEST:
        raise DeviceError(f"{path} is {found[0]}, which is too old", hint=REMEDY)
    version = found[0].replace(" version", "")
    link = (path, "-nostdlib", "-shared", *(f"-Wl,{option}" for option in _LINKING))
    return ClangCommands((path,), link, version, _identity(Path(path), version))


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()


def _identity(path: Path, version: str) -> str:
    about = path.resolve().stat()
    return f"{path.name} {version} {about.st_size} {about.st_mtime_ns}"
