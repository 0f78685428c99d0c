"""Finds and runs clang: from the ``ziglang`` wheel, from PATH, or the one that CPU_COMPILER names."""

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

#: the oldest clang that supports everything that kernels use
OLDEST = 15
#: the newest version number that is looked for on PATH
NEWEST = 40
#: the hint for users without a compiler
REMEDY = "install one: pip install ziglang (or clang 15 or newer, or name one with CPU_COMPILER)"
#: The full search for dead stores took half of the time of a convolution, and found the same ones.
_QUICK = ("-mllvm", "-dse-memoryssa-walklimit=10")
#: for every text. No flag changes values, because results are compared with references (denormals count as zero, in the
#: pool). Kernels ask for reassociation where they sum. -O2 is slower by up to 17 %.
FLAGS = (
    "-O3", "-std=gnu17", "-fPIC", "-ffreestanding", "-ffp-contract=on", "-fno-math-errno", "-fno-trapping-math",
    "-fdenormal-fp-math=preserve-sign", "-fvisibility=hidden", "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables", *_QUICK,
)  # fmt: skip
#: turns warnings into errors where the compiler would otherwise change the meaning of a text
STRICT = ("-w", "-Werror=unused-value", "-Werror=implicit-function-declaration")
#: for OpenCL C, in place of C's own flags: the text declares OpenCL's types and functions. Kernels get tensors that
#: begin at any element, so vectors may be unaligned.
OPENCL_C_FLAGS = (
    "-cl-std=CL1.2", "-cl-no-stdinc", "-Xclang", "-cl-ext=+cl_khr_fp64", "-fsigned-char", "-fmax-type-align=8", "-w",
)  # fmt: skip
#: the first line of a text in OpenCL C, and the line between it and the C that runs it
OPENCL_C, OPENCL_C_LOOP = "/* OpenCL C */", "/* ---- C that runs it ---- */"
#: most seconds for one text
PATIENCE = 300
#: folder for temporary files without a disk
_MEMORY = "/dev/shm"
_NO_SPACE, _ELF = "No space left on device", b"\x7fELF"
#: flags of the linker
_LINKING = ("--hash-style=gnu", "--build-id=sha1")
_TARGETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}


@dataclass(frozen=True)
class ClangCommands:
    """The commands that compile and link, and their identity."""

    compile: tuple[str, ...]
    #: links a shared object
    link: tuple[str, ...]
    #: product and version: a soft field of keys
    version: str
    #: version plus the executable file: if it changes, programs compiled before do not count as this compiler's work
    identity: str

    def build(self, text: str, flags: Sequence[str], label: str = "kernel", entry: str = "") -> bytes:
        """Compile a text in C or OpenCL C to a shared object. ExecutionError has the compiler's message.

        ``entry``: the function where the object begins when it runs as a program.
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
        """Compile OpenCL C to unoptimised bitcode and return its file."""
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
                if process.poll() is None and apart:  # includes processes that a wrapper has started
                    os.killpg(process.pid, signal.SIGKILL)
                elif process.poll() is None:
                    process.kill()
        # reasons are stored, but the folder is temporary
        said = said.replace(f"{Path(command[-1]).parent}{os.sep}", "")
        if process.returncode and _is_full(process.returncode, said):
            raise OSError(errno.ENOSPC, _NO_SPACE)
        if process.returncode:
            raise ExecutionError(f"{self.version} cannot compile {label}: {said[:2000] or ended(process.returncode)}")


def _is_full(code: int, said: str) -> bool:
    """Whether a compiler failed because of a full disk.

    Linkers write through mapped memory. If the file has no room for a page, they end silently with SIGBUS.
    """
    return code == -signal.SIGBUS or any(sign in said for sign in (_NO_SPACE, "Bus error"))


def _output(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Return the output of a process when it ends. Raise TimeoutExpired if that takes longer.

    `Popen.communicate` only polls for the end. A compiler whose memory is still being freed then counts for
    milliseconds more, while the next one could begin.
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
    except (AttributeError, OSError):  # an old system, or one that does not allow it
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
    """Describe how a process ended, from its exit status."""
    if code >= 0:
        return f"it ended with status {code}"
    try:
        return f"it ended with {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"it ended with signal {-code}"


@cache
def find(named: str = "") -> ClangCommands:
    """Return the compiler to use. Raise DeviceError if there is none. ``named``: the value of CPU_COMPILER. Raise
    SettingsError if that compiler is unsuitable."""
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
            except DeviceError as error:  # too old, for example: another one may do
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
    """Return the commands of Zig's binary, which contains clang and lld. Called so, it needs neither a home folder nor
    a cache."""
    version = _version_of_wheel(path.parent) if path == _zig_of_wheel() else ""
    version = version or _said(str(path), "version")
    if not re.match(r"\d+\.\d+", version):
        raise DeviceError(f"{path} is not zig", hint=REMEDY)
    target = f"--target={_TARGETS[isa.machine()]}"
    link = (str(path), "ld.lld", "-shared", "--threads=1", *_LINKING)  # its threads take longer to start than to link
    return ClangCommands((str(path), "clang", target), link, f"zig {version}", _identity(path, version))


def _version_of_wheel(package: Path) -> str:
    """Return the version of the package in a folder."""
    beside = [folder.name for folder in package.parent.glob("ziglang-*.dist-info")]
    if len(beside) == 1:
        return beside[0].removeprefix("ziglang-").removesuffix(".dist-info")
    import importlib.metadata  # slow to import

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
