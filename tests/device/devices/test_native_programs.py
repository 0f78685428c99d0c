"""Programs of the CPU device: compiled once, so many at a time as a model wants, stored where it wants them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

from native.children import NETWORK, python
from native.harness import native
from tunewright import Core
from tunewright.devices import build_options, kernel_cache
from tunewright.devices.kernel_cache import KernelCache
from tunewright.devices.native import compiler, objects, programs, usable_cores
from tunewright.devices.native.programs import LoadedProgram, NativePrograms, NoCompiler
from tunewright.errors import DeviceError, ExecutionError
from tunewright.settings import Settings

pytestmark = native


def text(name: str = "kernel") -> str:
    head = '#define EXPORT __attribute__((visibility("default")))\n'
    return head + f"EXPORT void {name}(const unsigned long long* a, int b, int e, int x, int y) {{}}\n"


@dataclass(frozen=True)
class Compiler(compiler.ClangCommands):
    """Counts what it compiles, and how much at a time."""

    #: so many are compiled at the same time, or it waits for them
    together: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    fails: list[ExecutionError] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"all": 0, "now": 0, "most": 0})
    lock: threading.Lock = field(default_factory=threading.Lock)

    def build(self, *arguments: Any, **options: Any) -> bytes:
        with self.lock:
            self.counts["all"] += 1
            self.counts["now"] += 1
            self.counts["most"] = max(self.counts["most"], self.counts["now"])
        try:
            self.together.wait(120)
            if self.fails:
                raise self.fails.pop()
            return super().build(*arguments, **options)
        finally:
            with self.lock:
                self.counts["now"] -= 1


def counted(identity: str = "counted", together: int = 1, fails: int = 0) -> Compiler:
    found, errors = compiler.find(), [ExecutionError("no")] * fails
    return Compiler(found.compile, found.link, found.version, identity, threading.Barrier(together), errors)


def made(found: Compiler | None) -> NativePrograms:
    return NativePrograms([], found, "test")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[KernelCache]:
    found = KernelCache(tmp_path / "kernels", 1 << 24)
    with kernel_cache.using(found):
        yield found


@pytest.fixture
def uncached() -> Iterator[None]:
    with kernel_cache.using(None):
        yield


@pytest.mark.parametrize("wanted, most", [(1, 1), (3, 3), (0, 6), (-1, 6), (100, 6)])
def test_as_many_compilers_as_the_model_wants(
    wanted: int, most: int, monkeypatch: pytest.MonkeyPatch, uncached: None
) -> None:
    monkeypatch.setattr(build_options, "cpu_count", lambda: 8)
    monkeypatch.setattr(usable_cores, "count", lambda: 6)  # the container's share of time
    found = counted(together=most)
    every = made(found)
    names = [f"k{n}" for n in range(12)]
    with build_options.using(Settings.make({"COMPILATION_NUM_THREADS": wanted})):
        for name in names:
            every.begin(text(name))
        for name in names:
            assert every.build(text(name)).entry(name)
    assert found.counts == {"all": 12, "now": 0, "most": most}


@dataclass(frozen=True)
class Ordered(Compiler):
    """Notes what it compiles; the first one ends when it may."""

    order: list[str] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)

    def build(self, text: str, flags: Any, label: str = "", entry: str = "") -> bytes:
        self.order.append(label)
        self.go_on.wait(60)
        return super().build(text, flags, label, entry)


def test_long_texts_come_first(uncached: None) -> None:
    """Of those that wait while others are compiled: what begins last should be short."""
    found = compiler.find()
    ordered = Ordered(found.compile, found.link, found.version, "ordered")
    every, names = made(ordered), ["kkk", "kk", "kkkkk", "kkkk"]
    with build_options.using(Settings.make({"COMPILATION_NUM_THREADS": 1})):
        every.begin(text("k"))
        while not ordered.order:
            time.sleep(0.001)
        for name in names:
            every.begin(text(name))
        while len(every._waiting) < len(names):
            time.sleep(0.001)
        ordered.go_on.set()
        for name in names:
            assert every.build(text(name)).entry(name)
    assert ordered.order == ["k", *sorted(names, reverse=True)]


def test_beginning_tells_what_is_there(cache: KernelCache) -> None:
    assert not made(counted()).begin(text())
    made(counted()).build(text())
    assert made(counted()).begin(text())


def test_a_text_is_compiled_once(uncached: None) -> None:
    found = counted()
    every, built = made(found), list[LoadedProgram]()

    def build() -> None:
        built.append(every.build(text()))

    threads = [threading.Thread(target=copy_context().run, args=(build,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 8 and len(set(map(id, built))) == 1
    assert found.counts["all"] == 1 and len(every) == 1


def test_what_failed_is_told_once_and_tried_again(uncached: None) -> None:
    found = counted(fails=3)
    every = made(found)
    every.begin(text())
    with pytest.raises(ExecutionError, match="no"):
        every.build(text())
    assert found.counts["all"] == 1, "who waits for what was begun compiles nothing"
    with pytest.raises(ExecutionError, match="no"):
        every.build(text())
    every.begin(text())
    with pytest.raises(ExecutionError, match="no"):
        every._begun[text()].result(120)
    every.begin(text())  # nobody has asked for the last one
    assert every.build(text()).entry("kernel") and found.counts["all"] == 4


def test_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch, uncached: None) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert made(counted()).build(text()).entry("kernel")


def test_programs_are_bounded(monkeypatch: pytest.MonkeyPatch, cache: KernelCache) -> None:
    monkeypatch.setattr(programs, "MOST", 3)
    every = made(counted())
    kept = [every.build(text(f"k{n}")) for n in range(6)]
    assert len(every) == 3 and len(every._stored) == 3
    assert all(program.entry(f"k{n}") for n, program in enumerate(kept)), "who holds one may go on using it"
    assert every.build(text("k0")).entry("k0") and cache.counters.hits == 1


# The kernel cache


def test_the_next_process_compiles_nothing(cache: KernelCache) -> None:
    made(counted()).build(text())
    found = counted()
    assert made(found).build(text()).entry("kernel")
    assert found.counts["all"] == 0 and cache.counters.stores == 1


def test_without_a_compiler_what_is_cached_still_runs(cache: KernelCache) -> None:
    made(counted()).build(text())
    every = made(None)
    assert every.build(text()).entry("kernel")
    for wish in (every.begin, every.build):
        with pytest.raises(NoCompiler, match="no C compiler") as error:
            wish(text("another"))
        assert "pip install ziglang" in error.value.hint
    assert cache.counters.stores == 1


def test_another_compilers_work_is_replaced(cache: KernelCache) -> None:
    made(counted("one")).build(text())
    other = counted("other")
    made(other).build(text())
    assert other.counts["all"] == 1 and cache.counters.stores == 2
    again, first = counted("other"), counted("one")
    made(again).build(text())
    made(first).build(text())
    assert (again.counts["all"], first.counts["all"]) == (0, 1)


def test_keys_have_flags_and_entry(cache: KernelCache) -> None:
    found = counted()
    for every in (
        NativePrograms([], found, ""),
        NativePrograms(["-DX"], found, ""),
        NativePrograms([], found, "", entry="kernel"),
    ):
        every.build(text())
    assert found.counts["all"] == 3 == len(cache.entries())


def test_a_changed_entry_is_a_miss(cache: KernelCache) -> None:
    made(counted()).build(text())
    (entry,) = cache.entries()
    for change in (lambda data: data[:-1], lambda data: b"", lambda data: data[:500] + b"\0" + data[501:] + b"x"):
        before = entry.path.read_bytes()
        entry.path.write_bytes(change(before))
        found = counted()
        assert made(found).build(text()).entry("kernel")
        assert found.counts["all"] == 1 and len(cache.entries()) == 1
        assert entry.path.read_bytes() != change(before)
    assert cache.counters.rejected == 3


def test_what_cannot_be_loaded_here_is_compiled_and_replaced(cache: KernelCache) -> None:
    """Signed as it is: an object for another C library, say."""
    every = made(counted())
    files = {programs.OBJECT: b"\x7fELF, but nothing that the loader takes", programs.COMPILER: b"counted"}
    cache.put(every._key(text()), files)
    assert every.build(text()).entry("kernel")
    assert cache.counters.stores == 2
    for files in ({}, {"other": b"x"}, {programs.COMPILER: b"counted"}):
        cache.put(every._key(text()), files)
        assert made(counted()).build(text()).entry("kernel")
    assert cache.counters.rejected == 2


def test_where_loading_fails_entries_stay(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """No handles are left, for example: nothing is wrong with what is stored."""
    made(counted()).build(text())
    monkeypatch.setattr(objects, "places", list)
    with pytest.raises(DeviceError, match="cannot be loaded"):
        made(counted()).build(text())
    assert len(cache.entries()) == 1 and cache.counters.rejected == 0
    monkeypatch.undo()
    found = counted()
    made(found).build(text())
    assert found.counts["all"] == 0


MODEL = '<ir_version: 10, opset_import: ["" : 21]> g (float[8, 40] x) => (float[8, 40] y) { s = Softmax(x) y = Erf(s) }'


def test_kernels_are_in_the_models_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CACHE_DIR of a config, also for what is compiled after the load; none with an empty one."""
    from tunewright.plugins.single import open_device

    monkeypatch.setattr(kernel_cache, "_caches", {})
    monkeypatch.setenv("TUNEWRIGHT_CACHE_DIR", str(tmp_path / "default"))
    device = open_device("CPU")

    def stored(folder: str | Path) -> int:
        device._programs._kept.clear()
        config = {"CACHE_DIR": str(folder)}
        compiled = Core(config).compile_model(parser.parse_model(MODEL), "CPU")
        compiled({"x": np.zeros((8, 40), np.float32)})
        return len(list(Path(folder).glob("*.kernel"))) if folder else 0

    assert stored(tmp_path / "mine") >= 2
    stored("")
    assert not (tmp_path / "default").exists()


SAME = (
    NETWORK
    + """
import json, sys
from tunewright.devices import kernel_cache
print(json.dumps([right(load()), kernel_cache.current().counters.as_dict()]))
"""
)


@pytest.mark.parametrize("times", [1, pytest.param(15, marks=pytest.mark.soak)])
def test_processes_compile_the_same_at_once(tmp_path: Path, times: int) -> None:
    for turn in range(times):
        folder, found = tmp_path / str(turn), list[Any]()

        def child(folder: Path = folder, found: list[Any] = found) -> None:
            found.append(python(SAME, TUNEWRIGHT_CACHE_DIR=str(folder)))

        threads = [threading.Thread(target=child) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4 and all(right for right, _ in found)
        assert all(counters["rejected"] == counters["errors"] == 0 for _, counters in found)
        right, counters = python(SAME, TUNEWRIGHT_CACHE_DIR=str(folder))
        assert right and counters["misses"] == counters["stores"] == 0
        assert not list(folder.glob("*.unfinished"))


def test_identities_tell_compilers_apart(tmp_path: Path) -> None:
    """By version, size and time of the file, not by where it is."""
    found = compiler.find()
    assert found.version.split()[-1] in found.identity
    assert dataclasses.replace(found, version="other").identity == found.identity
    (tmp_path / "cc").write_text("#!/bin/sh\n")
    one = compiler._identity(tmp_path / "cc", "1")
    assert one == compiler._identity(tmp_path / "cc", "1") != compiler._identity(tmp_path / "cc", "2")
    (tmp_path / "cc").write_text("#!/bin/sh\n#\n")
    assert compiler._identity(tmp_path / "cc", "1") != one
