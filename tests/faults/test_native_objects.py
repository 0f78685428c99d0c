"""Loading compiled kernels where memory files, folders or homes are not what one would like, and unloading them."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from native.children import NETWORK, TESTS, python
from native.harness import KERNELS, loaded, native
from tunewright.devices import build_options
from tunewright.devices.native import compiler, objects
from tunewright.devices.native.objects import SharedObject
from tunewright.errors import DeviceError, ExecutionError, SettingsError
from tunewright.settings import Settings

pytestmark = native


@pytest.fixture(scope="module")
def binary() -> bytes:
    return compiler.find().build(KERNELS, ["-Wno-everything"])


@pytest.fixture
def no_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def memfd_create(*arguments: object) -> int:
        raise PermissionError("memfd_create is denied")

    monkeypatch.setattr(os, "memfd_create", memfd_create)


def maps() -> str:
    return Path("/proc/self/maps").read_text()


def handles(name: str) -> list[str]:
    """Open files of this process with such a name."""
    found = []
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread's, which is gone
            found.append(os.readlink(f"/proc/self/fd/{handle}"))
    return [each for each in found if name in each]


def test_it_is_in_memory(binary: bytes) -> None:
    made = SharedObject(binary, "in_memory")
    assert "memfd:tunewright-in_memory" in maps()
    assert made.address("count") and not handles("memfd:tunewright-in_memory")
    with pytest.raises(ExecutionError, match="no kernel 'nobody'"):
        made.address("nobody")
    del made
    assert "tunewright-in_memory" not in maps()


def test_every_load_is_one_of_its_own(binary: bytes) -> None:
    """The loader takes what it has for the same file: handles are used again, files are not the same."""
    other = compiler.find().build(KERNELS.replace("count", "other"), ["-Wno-everything"])
    kept = [SharedObject(text) for text in (binary, other, binary, other)]
    assert len({made.address("place") for made in kept}) == 4
    for made, (mine, others) in zip(kept, [("count", "other"), ("other", "count")] * 2, strict=True):
        assert made.address(mine)
        with pytest.raises(ExecutionError):
            made.address(others)


@pytest.mark.parametrize("handles", ["/proc/self/fd", "/proc/nothing/here"])
def test_without_memory_files(
    binary: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_memory_files: None, handles: str
) -> None:
    """A private file, which is gone when it is loaded by its handle; without /proc it is gone afterwards."""
    seen: list[tuple[str, list[str]]] = []
    dlopen = _ctypes.dlopen

    def watched(path: str, flags: int) -> int:
        files = os.listdir(tmp_path)
        assert all(stat.S_IMODE(os.stat(tmp_path / file).st_mode) == 0o700 for file in files)
        seen.append((path, files))
        return dlopen(path, flags)

    monkeypatch.setattr(objects._ctypes, "dlopen", watched)
    monkeypatch.setattr(objects, "_HANDLES", handles)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = SharedObject(binary)
    assert made.address("count") and not os.listdir(tmp_path)
    ((path, files),) = seen
    assert path.startswith("/proc/self/fd") and not files if handles == "/proc/self/fd" else path.endswith(files[0])


def test_python_without_memory_files(binary: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert SharedObject(binary).address("count")


def test_nowhere(binary: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_memory_files: None) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    monkeypatch.setattr(objects, "own_folder", lambda kind: tmp_path / "file" / kind)
    with pytest.raises(DeviceError, match="TMPDIR must name a folder"):
        SharedObject(binary)


def test_what_is_no_object(monkeypatch: pytest.MonkeyPatch) -> None:
    for rubbish in (b"", b"\x7fELF" + bytes(100), b"garbage" * 1000):
        with pytest.raises(DeviceError, match="cannot be loaded"):
            SharedObject(rubbish)


# They come and go


COME_AND_GO = """
import gc, json, os, sys
from pathlib import Path
from native.harness import KERNELS
from tunewright.devices.native import compiler
from tunewright.devices.native.objects import SharedObject as Loaded
if "denied" in sys.argv:
    def denied(*arguments):
        raise PermissionError("memfd_create is denied")
    os.memfd_create = denied
binary = compiler.find().build(KERNELS, ["-Wno-everything"])
def state():
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Path("/proc/self/maps").read_text().count("\\n"), len(os.listdir("/proc/self/fd")), resident
def load(first, last):
    for number in range(first, last):
        made = Loaded(binary, f"k{number}")
        assert made.address("count") != made.address("mix")
load(0, 50)
before = state()
load(50, 50 + int(sys.argv[1]))
print(json.dumps([b - a for a, b in zip(before, state())]))
"""


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("memory", ["memory", "denied"])
def test_nothing_is_left_of_objects_that_went(memory: str, count: int) -> None:
    """In a process of its own: threads of other tests open files, and take memory."""
    lines, handles_, bytes_ = python(COME_AND_GO, count, memory)
    assert lines <= 2 and not handles_
    assert bytes_ < 2 << 20, "memory grows"


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.soak)])
def test_nothing_is_left_of_programs_that_went(count: int, tmp_path: Path) -> None:
    """Texts that are compiled, run and dropped, as in a search: of a device that keeps eight."""
    grown, lines, folder = python(
        """
import gc, json, os, sys
from pathlib import Path
import numpy as np
from helpers.launches import run_text
from tunewright.devices.native import programs
from tunewright.plugins.single import open_device
programs.MOST = 8
device = open_device("CPU")
out, count = np.zeros(64, np.float32), int(sys.argv[1])
def run(number):
    name = f"kernel_{number}"
    text = f'''#define EXPORT __attribute__((visibility("default")))
EXPORT void {name}(const unsigned long long* a, int b, int e, int x, int y) {{
  for (; b < e; b++) ((float*)a[0])[b] = {number};
}}
'''
    run_text(device, text, name, (64,), [out])
    assert (out == number).all()
def state():
    gc.collect()
    statm = int(Path("/proc/self/statm").read_text().split()[1])
    return statm * 4096, Path("/proc/self/maps").read_text().count("tunewright-kernel")
for number in range(20):
    run(number)
before = state()
for number in range(20, 20 + count):
    run(number)
after = state()
print(json.dumps([after[0] - before[0], after[1] - before[1], len(device._programs)]))
""",
        count, TUNEWRIGHT_CACHE_DIR="", timeout=900,
    )  # fmt: skip
    assert grown < 4 << 20 and lines == 0 and folder == 8


def test_a_launcher_keeps_its_programs() -> None:
    """Everything else that has them is dropped: the plan, the model, what the device keeps."""
    assert python(
        NETWORK
        + """
import gc, json
from pathlib import Path
from tunewright.plugins.single import open_device
def loaded():
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:tunewright-")
device, none = open_device("CPU"), loaded()
request = load()
assert right(request)
((_, frame),) = request.executor.frames()
kept, bound = [*frame.memory], frame.segments[0].bound  # memory of the arguments is the request's
values = {i: np.zeros(1 << 20, np.uint8) for i, _ in bound._given}
count = loaded()
del request, frame
device._programs._kept.clear()
left = loaded()
for _ in range(50):
    bound.invoke(values)
del bound
print(json.dumps(left == count > none and loaded() == none))
"""
    )


# perf and gdb


@pytest.fixture(scope="module")
def symbols(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], dict[str, int], Path]]:
    """A process with kernels whose files are kept, and where they are."""
    folder = tmp_path_factory.mktemp("symbols")
    code = (
        NETWORK
        + """
import json, sys
request = load()
assert right(request)
from tunewright.devices.native.programs import name_of
programs = request.model.env.device._programs._kept
names = {name_of(text): program.entry(name_of(text)) for text, program in programs.items()}
print(json.dumps(names), flush=True)
sys.stdin.readline()
"""
    )
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)]),
        "TUNEWRIGHT_KERNEL_SYMBOLS_DIR": str(folder),
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline()), folder
        process.kill()


def test_perf_would_find_kernels(symbols: tuple[subprocess.Popen[str], dict[str, int], Path]) -> None:
    """As it does: the mapping of an address names a file, whose symbols have the offset."""
    process, names, folder = symbols
    assert names
    mappings = [line.split() for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    for name, address in names.items():
        (line,) = [row for row in mappings if int(row[0].split("-")[0], 16) <= address < int(row[0].split("-")[1], 16)]
        assert Path(line[5]).parent == folder and "x" in line[1]
        if shutil.which("nm") is None:
            continue
        command = ["nm", "-D", "--defined-only", line[5]]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        base = min(int(row[0].split("-")[0], 16) for row in mappings if row[5:] == line[5:])
        assert {row.split()[2]: int(row.split()[0], 16) for row in said.splitlines()}[name] == address - base


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_gdb_finds_kernels(symbols: tuple[subprocess.Popen[str], dict[str, int], Path]) -> None:
    process, names, folder = symbols
    questions = [part for address in names.values() for part in ("-ex", f"info symbol {address:#x}")]
    command = ["gdb", "-p", str(process.pid), "-batch", "-nx", *questions]
    environment = {**os.environ, "DEBUGINFOD_URLS": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip("processes may not be traced here")
    for name in names:
        assert f"{name} in section .text of {folder}" in done.stdout, done.stdout + done.stderr


def test_a_folder_of_symbols_that_others_may_write_to(
    binary: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is put there instead would be loaded."""
    monkeypatch.setenv("TUNEWRIGHT_KERNEL_SYMBOLS_DIR", str(tmp_path / "open"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(SettingsError, match="others than you may write there"):
        SharedObject(binary)
    (tmp_path / "open").chmod(0o1777)  # as /tmp: nobody removes what is another's
    assert SharedObject(binary).address("count")
    monkeypatch.setenv("TUNEWRIGHT_KERNEL_SYMBOLS_DIR", "/dev/null/none")
    with pytest.raises(SettingsError, match="KERNEL_SYMBOLS_DIR"):
        SharedObject(binary)
    with build_options.using(Settings.make({"KERNEL_SYMBOLS_DIR": str(tmp_path / "model's")})):
        assert SharedObject(binary).address("count") and len(os.listdir(tmp_path / "model's")) == 1


# Homes, disks and mounts. In a process of its own each, as root in a namespace with mounts of its own.

RESULT = (
    NETWORK
    + """
import json, logging, os, sys
told = []
class Told(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())
logging.getLogger("tunewright").addHandler(Told())
if "denied" in sys.argv:
    def denied(*arguments):
        raise PermissionError("memfd_create is denied")
    os.memfd_create = denied
from tunewright.errors import DeviceError
from tunewright.plugins.single import open_device
try:
    family = open_device("CPU.NATIVE").family
    fine = right(load())
except DeviceError as error:
    family, fine = str(error), None
print(json.dumps([family, fine, told]))
"""
)


def mounting(*commands: str) -> list[str]:
    """Runs what follows behind some commands, with mounts that nobody else sees."""
    return ["unshare", "-m", "sh", "-ec", "\n".join([*commands, 'exec "$@"']), "sh"]


mounts = pytest.mark.skipif(
    os.geteuid() != 0
    or shutil.which("unshare") is None
    or subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode != 0,
    reason="needs to mount file systems: root, and unshare",
)
OWN = {
    "XDG_CACHE_HOME": None, "XDG_CONFIG_HOME": None, "XDG_DATA_HOME": None, "TUNEWRIGHT_CACHE_DIR": None,
    "TUNEWRIGHT_CACHE_BYTES": None,
}  # fmt: skip


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    return tmp_path / "home", tmp_path / "temporary"


@mounts
@pytest.mark.parametrize("denied", ["denied", "memory"])
def test_noexec_folder_for_temporary_files(places: tuple[Path, Path], denied: str) -> None:
    """Kernels are loaded from memory; where that is denied, from the user's cache folder."""
    home, temporary = places
    within = mounting(f"mount -t tmpfs -o noexec tmpfs {temporary}")
    result = python(RESULT, denied, within=within, HOME=str(home), TMPDIR=str(temporary), **OWN)
    assert result == ["native", True, []]
    assert (home / ".cache/tunewright/loaded").exists() == (denied == "denied")
    assert not list((home / ".cache/tunewright/loaded").glob("*"))


@mounts
def test_nothing_may_be_executed_anywhere(places: tuple[Path, Path]) -> None:
    home, temporary = places
    within = mounting(f"mount -t tmpfs -o noexec tmpfs {temporary}", f"mount -t tmpfs -o noexec tmpfs {home}")
    family, fine, _ = python(RESULT, "denied", within=within, HOME=str(home), TMPDIR=str(temporary), **OWN)
    assert "cannot be loaded" in family and "TMPDIR must name a folder" in family and fine is None


@mounts
@pytest.mark.parametrize("denied", ["denied", "memory"])
def test_read_only_home(places: tuple[Path, Path], denied: str) -> None:
    home, temporary = places
    within = mounting(f"mount -t tmpfs -o ro tmpfs {home}")
    family, fine, told = python(RESULT, denied, within=within, HOME=str(home), TMPDIR=str(temporary), **OWN)
    assert (family, fine) == ("native", True) and len(told) == 1 and "there is no kernel cache" in told[0]
    assert not os.listdir(temporary)


@mounts
@pytest.mark.parametrize("where", ["home", "temporary", "both"])
@pytest.mark.parametrize("denied", ["denied", "memory"])
def test_full_disk(places: tuple[Path, Path], where: str, denied: str) -> None:
    """Of 16 KiB: objects are smaller, a model's kernels together are not. Compilers write to memory then."""
    home, temporary = places
    full = [place for name, place in (("home", home), ("temporary", temporary)) if where in (name, "both")]
    within = mounting(*(f"mount -t tmpfs -o size=16k tmpfs {place}" for place in full))
    family, fine, told = python(RESULT, denied, within=within, HOME=str(home), TMPDIR=str(temporary), **OWN)
    if where == "both" and denied == "denied":
        # There is no place at all. Small programs fit as soon as the compiler beside them has given its room back.
        assert "No space left" in family
        assert "no program can be run here" in family or "compiled kernels cannot be loaded" in family
    else:
        assert (family, fine) == ("native", True)
        assert len(told) <= 1 and (where == "temporary" or "compiled kernels cannot be kept" in told[0])


def other_user(*environment: str) -> list[str]:
    """Runs what follows as a user that nobody knows; it may read everything, since Python is anywhere."""
    return [
        "setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "--inh-caps=+dac_read_search",
        "--ambient-caps=+dac_read_search", "env", *environment,
    ]  # fmt: skip


other = pytest.mark.skipif(
    os.geteuid() != 0
    or shutil.which("setpriv") is None
    or subprocess.run([*other_user(), "true"], capture_output=True).returncode != 0,
    reason="needs to become another user: root, and setpriv",
)


@other
@pytest.mark.parametrize("home", ["none", "another user's", "another user's, and open"])
def test_homes_of_others(tmp_path: Path, home: str) -> None:
    """No HOME and no entry in the list of users; a home that is root's; one that anybody may write to."""
    folder, work = Path("/tmp") / f"tunewright-test-{os.getpid()}", tmp_path / "work"
    folder.mkdir(mode=0o777)
    try:
        folder.chmod(0o777 if "open" in home else 0o755)
        environment = ["-u", "HOME"] if home == "none" else [f"HOME={folder}"]
        code = "import os; os.chdir('/tmp')\n" + RESULT
        family, fine, told = python(code, within=other_user(*environment), TMPDIR="/tmp", **OWN)
        assert (family, fine) == ("native", True)
        assert told == [] if "open" in home else "there is no kernel cache" in told[0] and len(told) == 1
    finally:
        shutil.rmtree(folder)
    assert not os.path.exists("/tmp/~") and not work.exists()


def test_bytes_are_what_was_given(binary: bytes) -> None:
    """The file that is loaded has them, and cannot be written through its handle."""
    for place in (None, Path("/tmp")):
        with objects.file_of(binary, "kernel", place) as (path, (handle,)):
            assert Path(path).read_bytes() == binary
            with pytest.raises(OSError):
                os.write(handle, b"x")


def test_the_library_calls_its_functions(binary: bytes) -> None:
    counts = (ctypes.c_int * 10)()
    words = (ctypes.c_uint64 * 2)(ctypes.addressof(counts), 0)
    loaded().library.count(words, 2, 7, 10, 1)
    assert list(counts) == [0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
