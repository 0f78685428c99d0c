"""Compilers that hang, crash, lie or are not there, and those of a system instead of the wheel's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults import workers
from native.children import NETWORK, TESTS, python
from native.harness import native
from tunewright.devices.kernel_cache import KernelCache
from tunewright.devices.native import compiler, processor
from tunewright.errors import DeviceError, ExecutionError, SettingsError

pytestmark = native
TEXT = '__attribute__((visibility("default"))) int f(int x) { return x + 1; }'
#: clangs of the system that are new enough
CLANGS = [name for name in ("clang", *(f"clang-{n}" for n in range(40, 14, -1))) if shutil.which(name)]
Script = Callable[..., str]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    """Makes a program that says that it is some clang, and otherwise does what a shell is told."""

    def make(body: str, version: str = "clang version 19.1.7 (test)", name: str = "clang") -> str:
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit 0; fi\n{body}\n')
        path.chmod(0o755)
        compiler.find.cache_clear()
        return str(path)

    yield make
    compiler.find.cache_clear()


@pytest.mark.parametrize(
    "body, said",
    [
        ("kill -SEGV $$", "it ended with SIGSEGV"),
        ("kill -KILL $$", "it ended with SIGKILL"),
        ("exit 7", "it ended with status 7"),
        ("echo 'kernel.c:1: it is wrong' >&2; exit 1", "kernel.c:1: it is wrong"),
        ("printf '\\377\\376\\200 %s' \"$*\"; exit 1", "\N{REPLACEMENT CHARACTER}"),
        ("exit 0", "not a shared object"),
        ("for last; do :; done; echo garbage > $last", "not a shared object"),
        ("head -c 3000000 /dev/urandom; exit 0", "not a shared object"),
        ("head -c 3000000 /dev/zero | tr '\\0' x; exit 1", "xxxxxxxxxx"),
    ],
)
def test_compilers_that_fail(script: Script, body: str, said: str) -> None:
    found = compiler.find(script(body))
    with pytest.raises(ExecutionError) as error:
        found.build(TEXT, [], "softmax")
    assert said in str(error.value) and len(str(error.value)) < 4000
    assert "clang 19.1.7" in str(error.value) and "softmax" in str(error.value)


def test_a_compiler_that_hangs(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with all that it started."""
    told = tmp_path / "child"
    found = compiler.find(script(f"sleep 1000 & echo $! > {told}.part; mv {told}.part {told}; wait"))
    for seconds in (0.5, 4.0, 32.0):  # on a machine that is very busy it does not come so far
        monkeypatch.setattr(compiler, "PATIENCE", seconds)
        begin = time.monotonic()
        with pytest.raises(ExecutionError, match=f"took more than {seconds:g} s"):
            found.build(TEXT, [])
        assert time.monotonic() - begin < seconds + 60
        if told.exists():
            break
    assert workers.is_gone(int(told.read_text()), 60), "what it started is left"


def test_a_compiler_that_goes_away(script: Script) -> None:
    path = script("exit 0")
    found = compiler.find(path)
    os.unlink(path)
    with pytest.raises(ExecutionError, match="cannot be run: No such file"):
        found.build(TEXT, [])


def test_nothing_is_left_behind(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    for found in (compiler.find(script("exit 1")), compiler.find()):
        for text in (TEXT, "this is not C"):
            try:
                found.build(text, [])
            except ExecutionError as error:
                assert str(tmp_path) not in str(error)
    assert not os.listdir(tmp_path / "temporary")


def test_without_a_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory serves instead, where the system shows some."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    if os.path.isdir(compiler._MEMORY):
        assert compiler.find().build(TEXT, []).startswith(b"\x7fELF")
    monkeypatch.setattr(compiler, "_MEMORY", str(tmp_path / "none either"))
    with pytest.raises(ExecutionError, match=r"needs a folder for temporary files.*TMPDIR"):
        compiler.find().build(TEXT, [])


@pytest.mark.parametrize("how", [
    "kill -BUS $$", "echo 'clang: error: unable to execute command: Bus error'; exit 254",
    "echo 'ld.lld: error: kernel.so: No space left on device'; exit 1",
])  # fmt: skip
def test_a_full_folder_for_temporary_files(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """However a compiler ends there (a linker by SIGBUS), the next folder is tried."""
    (full := tmp_path / "full").mkdir()
    (other := tmp_path / "other").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(full))
    monkeypatch.setattr(compiler, "_MEMORY", str(other))
    body = f"for last; do :; done; case $last in {full}*) {how};; esac; printf '\\177ELF' > $last"
    found = compiler.find(script(body))
    assert found.build(TEXT, []) == b"\x7fELF"
    monkeypatch.setattr(compiler, "_MEMORY", str(full))
    with pytest.raises(ExecutionError, match=r"temporary files: .*No space left on device.*TMPDIR"):
        found.build(TEXT, [])


# Which one is found


@pytest.mark.parametrize(
    "version, said",
    [
        ("gcc (Debian 12.2.0-14) 12.2.0", "is not clang"),
        ("Debian clang version 14.0.6", "clang version 14.0.6, which is too old"),
        ("", "is not clang"),
    ],
)
def test_what_is_refused(script: Script, version: str, said: str) -> None:
    path = script("exit 0", version)
    with pytest.raises((DeviceError, SettingsError)) as error:
        compiler.find(path)
    assert said in str(error.value) and "CPU_COMPILER" in str(error.value)


def test_a_zig_that_is_none(script: Script) -> None:
    with pytest.raises((DeviceError, SettingsError), match="is not zig"):
        compiler.find(script("echo no", name="zig"))


def test_a_program_that_is_not_there() -> None:
    with pytest.raises((DeviceError, SettingsError), match="CPU_COMPILER"):
        compiler.find("no-such-clang")


def test_names_on_path(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel: the one called clang, else the newest name with a version; what is too old is passed over."""
    monkeypatch.setattr(compiler, "_zig_of_wheel", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="there is no C compiler"):
        compiler.find()
    script("exit 0", "clang version 14.0.6")
    with pytest.raises(DeviceError, match="too old"):
        compiler.find()
    script("exit 0", "clang version 16.0.1", "clang-16")
    assert compiler.find().version == "clang 16.0.1"
    script("exit 0", "clang version 19.1.7", "clang-19")
    assert compiler.find().version == "clang 19.1.7"
    script("exit 0", "Debian clang version 15.0.0")
    assert compiler.find().version == "clang 15.0.0"


# No compiler at all

HIDDEN = (
    """
import json, logging, os, sys
told = []
class Told(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())
logging.getLogger("tunewright").addHandler(Told())
if sys.argv[1] == "hidden":
    sys.modules["ziglang"] = None
    os.environ["PATH"] = "/nowhere"
"""
    + NETWORK
    + """
from tunewright.devices import kernel_cache
from tunewright.plugins.single import open_device
text = text.replace("Tanh", sys.argv[2])
def expected(f={"Tanh": np.tanh, "Sin": np.sin}[sys.argv[2]]):
    a = x @ w
    e = np.exp(a - a.max(1, keepdims=True))
    return f(e / e.sum(1, keepdims=True) @ w) + x
config = json.loads(sys.argv[3])
try:
    request = load(**config)
    fine = [right(request), right(load(**config))]
    y = request.infer({"x": x, "w": w})["y"].tobytes().hex()
except tunewright.TunewrightError as error:
    fine, y = str(error), ""
cache = kernel_cache.current()
print(json.dumps([fine, y, told, cache.counters.as_dict() if cache else None, open_device("CPU").family]))
"""
)


def test_without_a_compiler(tmp_path: Path) -> None:
    """What is in the cache runs, with the same results; what is not goes to numpy, with one warning."""
    where = {"TUNEWRIGHT_CACHE_DIR": str(tmp_path / "kernels")}
    fine, y, told, counters, family = python(HIDDEN, "there", "Tanh", "{}", **where)
    assert fine == [True, True] and not told and counters["stores"] and family == "native"

    fine, again, told, counters, family = python(HIDDEN, "hidden", "Tanh", "{}", **where)
    assert fine == [True, True] and not told and family == "native" and again == y
    assert counters["misses"] == counters["stores"] == counters["rejected"] == 0 < counters["hits"]

    fine, _, told, counters, family = python(HIDDEN, "hidden", "Sin", "{}", **where)
    assert fine == [True, True] and family == "native" and counters["stores"] == counters["rejected"] == 0
    (warning,) = told
    assert "numpy" in warning and "pip install ziglang" in warning

    fine, _, told, _, _ = python(HIDDEN, "hidden", "Sin", '{"HOST_FALLBACK": "NO"}', **where)
    assert "there is no C compiler" in fine and "pip install ziglang" in fine

    fine, again, told, _, family = python(HIDDEN, "there", "Tanh", "{}", **where)
    assert fine == [True, True] and not told and again == y


def test_without_a_compiler_and_without_a_cache(tmp_path: Path) -> None:
    for folder in ("", str(tmp_path / "empty")):
        fine, _, told, _, family = python(HIDDEN, "hidden", "Tanh", "{}", TUNEWRIGHT_CACHE_DIR=folder)
        (warning,) = told
        assert fine == [True, True] and family == "host"
        assert "numpy" in warning and "there is no C compiler" in warning and "pip install ziglang" in warning


def test_the_compiler_comes_and_goes(tmp_path: Path) -> None:
    """Another compiler's work is replaced while there is one, and serves when there is none."""
    if not CLANGS:
        pytest.skip("there is no clang on PATH")
    where = {"TUNEWRIGHT_CACHE_DIR": str(tmp_path / "kernels")}
    python(HIDDEN, "there", "Tanh", "{}", **where)
    newer = {**where, "TUNEWRIGHT_CPU_COMPILER": str(shutil.which(CLANGS[0]))}
    fine, y, told, counters, _ = python(HIDDEN, "there", "Tanh", "{}", **newer)
    assert fine == [True, True] and not told and counters["stores"] and not counters["rejected"]
    fine, again, told, counters, _ = python(HIDDEN, "hidden", "Tanh", "{}", **where)
    assert fine == [True, True] and not told and again == y and not counters["stores"]


# The system's clang

CONFORMANCE = (
    "tests/conformance/test_kernels_softmax.py", "tests/conformance/test_kernels_matmul.py",
    "tests/conformance/test_kernels_conv_blocked.py", "tests/conformance/test_kernels_shuffle.py",
    "tests/conformance/test_kernels_bytes.py", "tests/conformance/test_kernels_resize.py",
)  # fmt: skip


@pytest.mark.parametrize(
    "name, module",
    [
        pytest.param(name, module, marks=[pytest.mark.soak] if (name, module) != (CLANGS[0], CONFORMANCE[0]) else [])
        for name in CLANGS[:2] for module in CONFORMANCE
    ],
)  # fmt: skip
def test_conformance_with_a_clang_of_the_system(name: str, module: str, tmp_path: Path) -> None:
    """The kernels of some families, compiled by it."""
    environment = {
        **os.environ, "TUNEWRIGHT_CPU_COMPILER": str(shutil.which(name)), "PYTHONPATH": os.pathsep.join(sys.path),
        "TUNEWRIGHT_CACHE_DIR": str(tmp_path),  # else the wheel's objects would be replaced
    }  # fmt: skip
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not soak", "-p", "no:cacheprovider", module],
        cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stdout[-4000:]


# The probe


def program(instructions: str) -> bytes:
    return compiler.find().build(f'__asm__(".text; .globl start; start: {instructions}");', [], entry="start")


X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="written for x86-64")


@X86
@pytest.mark.parametrize(
    "instructions, said",
    [
        ("mov $231, %eax; xor %edi, %edi; syscall", ""),
        ("mov $231, %eax; mov $3, %edi; syscall", "its results are wrong"),
        ("ud2", "it ended with SIGILL"),
        ("movl $0, 0", "it ended with SIGSEGV"),
        ("hlt", "it ended with SIGSEGV"),
        ("mov $231, %eax; mov $9, %edi; syscall", "it ended with status 9"),
    ],
)
def test_what_the_probe_survives(instructions: str, said: str) -> None:
    assert processor.run(program(instructions)) == said


@X86
def test_a_probe_without_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert processor.run(program("ud2")) == "it ended with SIGILL"
    assert processor.run(program("mov $231, %eax; xor %edi, %edi; syscall")) == ""


def test_every_level_runs() -> None:
    for level in processor.processor().levels:
        text = processor.probe(level)
        for found in {compiler.find(), *(compiler.find(name) for name in CLANGS[:1])}:
            assert processor.run(found.build(text, level.flags, entry="start")) == "", level.title
        tried = [f for f in (*level.features, *level.extras) if f in processor._INSTRUCTIONS]
        assert text.count("__asm__ volatile") == len(tried) >= len(level.features) - 3


PROBED = """
import json, logging, os, sys
from tunewright.devices import kernel_cache
from tunewright.devices.native import processor
runs, run = [], processor.run
def counted(binary):
    runs.append(len(binary))
    return "it ended with SIGILL" if "broken" in sys.argv else run(binary)
processor.run = counted
from tunewright.plugins.single import available, open_device
reasons = available()[1]
print(json.dumps([len(runs), open_device("CPU").family, reasons.get("CPU.NATIVE", "")]))
"""


OPENED = """
import json
from tunewright.plugins.single import expect, open_device
expect("CPU")
print(json.dumps(open_device("CPU").family))
"""


def test_what_is_compiled_beside_is_kept_and_leaves_nothing(tmp_path: Path) -> None:
    """A process that ends while its thread pool is compiled: the next one finds it."""
    (tmp_path / "temporary").mkdir()
    where = {"TUNEWRIGHT_CACHE_DIR": str(tmp_path / "kernels"), "TMPDIR": str(tmp_path / "temporary")}
    assert python(OPENED, **where) == "native"
    labels = [entry.label for entry in KernelCache(tmp_path / "kernels", 1 << 30).entries()]
    assert "thread pool" in labels
    assert not os.listdir(tmp_path / "temporary")


def test_only_a_right_verdict_is_remembered(tmp_path: Path) -> None:
    where = {"TUNEWRIGHT_CACHE_DIR": str(tmp_path / "kernels")}
    for _ in range(2):
        runs, family, reason = python(PROBED, "broken", **where)
        assert runs and family != "native" and "it ended with SIGILL" in reason
    assert python(PROBED, "well", **where) == [1, "native", ""]
    assert python(PROBED, "well", **where) == [0, "native", ""]
    if CLANGS:  # what another compiler makes of the probe is another matter
        other = {**where, "TUNEWRIGHT_CPU_COMPILER": str(shutil.which(CLANGS[0]))}
        assert python(PROBED, "well", **other) == [1, "native", ""]
