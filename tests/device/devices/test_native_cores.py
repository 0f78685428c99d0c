"""How many threads there are and where they run, read from trees of files as machines of many kinds show them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from native.harness import Table, crowded, loaded, native, table_of
from tunewright.devices import build_options
from tunewright.devices.host import cpu_flags
from tunewright.devices.native import isa, pool, usable_cores
from tunewright.devices.native.pool import ThreadPool
from tunewright.devices.native.processor import processor, thread_pool


def tree(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# Instruction sets


def test_what_linux_tells_of_the_processor_is_so() -> None:
    """By it the first probe is compiled before the processor was asked."""
    if isa.machine() != "x86_64":
        pytest.skip("Linux lists features under these names on x86-64")
    highest = processor().levels[-1]
    told = isa.named(cpu_flags())
    assert told, "/proc/cpuinfo has flags"
    assert isa.named(frozenset({"pni", "ssse3", "abm", "smap"})) == {"sse3", "ssse3", "lzcnt"}
    # A kernel older than the processor lists fewer.
    likely = isa.executable(told, isa.machine())[-1]
    assert {*likely.features, *likely.extras} <= {*highest.features, *highest.extras}


# The container's share of time

V2 = "0::{}\n"
V1 = "11:cpuset:/\n4:cpu,cpuacct:{0}\n3:memory:/elsewhere\n1:name=systemd:{0}\n0::/init.scope\n"

QUOTAS = {
    "none: a machine without groups": ("", {}, None),
    "v2, no bound": (V2.format("/"), {"cpu.max": "max 100000\n"}, None),
    "v2, the container's own root": (V2.format("/"), {"cpu.max": "150000 100000\n"}, 1.5),
    "v2, half a processor": (V2.format("/"), {"cpu.max": "50000 100000\n"}, 0.5),
    "v2, a short period": (V2.format("/"), {"cpu.max": "20000 10000\n"}, 2.0),
    "v2, the root shows nothing": (V2.format("/pods/p1/c1"), {"pods/p1/c1/cpu.max": "400000 100000\n"}, 4.0),
    "v2, the group around it has less": (
        V2.format("/a/b/c"),
        {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n", "a/b/c/cpu.max": "800000 100000\n"}, 3.0,
    ),
    "v2, a group beside has less": (V2.format("/a/b"), {"a/b/cpu.max": "200000 100000", "a/x/cpu.max": "1 9"}, 2.0),
    "v2, seen from another namespace": (V2.format("/../../other"), {"cpu.max": "200000 100000\n"}, 2.0),
    "v2, something else is in the file": (V2.format("/"), {"cpu.max": "rubbish\n"}, None),
    "v2, a period of nothing": (V2.format("/"), {"cpu.max": "1000 0\n"}, None),
    "v2 beside v1": (V2.format("/u"), {"unified/u/cpu.max": "250000 100000\n"}, 2.5),
    "v1, no bound": (
        V1.format("/"), {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, None,
    ),
    "v1, docker": (
        V1.format("/docker/4f"),
        {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
         "cpu,cpuacct/docker/4f/cpu.cfs_quota_us": "350000\n", "cpu,cpuacct/docker/4f/cpu.cfs_period_us": "100000\n"},
        3.5,
    ),
    "v1, the container sees its group as the root": (
        V1.format("/docker/4f"), {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0,
    ),
    "v1, half of it is there": (V1.format("/"), {"cpu/cpu.cfs_quota_us": "200000\n"}, None),
    "lines that are none": ("\n:\n7\n0::/\n", {"cpu.max": "100000 100000\n"}, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("case", QUOTAS)
def test_quota(tmp_path: Path, case: str) -> None:
    membership, files, expected = QUOTAS[case]
    (tmp_path / "membership").write_text(membership)
    assert usable_cores.quota(tree(tmp_path / "cgroup", files), tmp_path / "membership") == expected


def test_quota_of_a_group_with_a_strange_name(tmp_path: Path) -> None:
    (tmp_path / "membership").write_bytes(b"0::/\xff\xfe\n")
    assert usable_cores.quota(tree(tmp_path, {"cpu.max": "100000 100000"}), tmp_path / "membership") == 1


def test_quota_without_files(tmp_path: Path) -> None:
    assert usable_cores.quota(tmp_path / "nothing", tmp_path / "no membership") is None


@pytest.mark.parametrize(
    "allowed, share, threads",
    [(16, None, 16), (16, 4.0, 4), (2, 4.0, 2), (16, 2.5, 3), (16, 2.01, 2), (16, 0.3, 1), (1, None, 1), (3, 3.0, 3)],
)
def test_threads_are_the_least_of_affinity_and_quota(
    monkeypatch: pytest.MonkeyPatch, allowed: int, share: float | None, threads: int
) -> None:
    monkeypatch.setattr(usable_cores, "allowed", lambda: list(range(allowed)))
    monkeypatch.setattr(usable_cores, "quota", lambda: share)
    assert usable_cores.count() == threads


def test_affinity_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores.allowed() == [min(before)] and usable_cores.count() == 1
        assert usable_cores.places("YES", 1) == [(min(before), frozenset({min(before)}))]
    finally:
        os.sched_setaffinity(0, before)


# Nodes of memory

NODES = {
    "two sockets": ({"node0/cpulist": "0-15,32-47\n", "node1/cpulist": "16-31,48-63\n"}, range(64), [32, 32]),
    "one node": ({"node0/cpulist": "0-7\n"}, range(8), [8]),
    "a node without processors": ({"node0/cpulist": "0-3\n", "node1/cpulist": "\n"}, range(4), [4]),
    "only memory beside two": (
        {"node0/cpulist": "0-1\n", "node1/cpulist": "2-3\n", "node2/cpulist": "\n"}, range(4), [2, 2],
    ),
    "in the order of numbers": (
        {f"node{n}/cpulist": f"{2 * n}-{2 * n + n % 2}\n" for n in range(12)}, range(24), [1, 2] * 6,
    ),
    "processors that are off": ({"node0/cpulist": "0,2\n", "node1/cpulist": "4,6\n"}, (0, 2, 4, 6), [2, 2]),
    "a part of the machine": ({"node0/cpulist": "0-15\n", "node1/cpulist": "16-31\n"}, (14, 15, 16), [2, 1]),
    "one node of two": ({"node0/cpulist": "0-15\n", "node1/cpulist": "16-31\n"}, range(16, 32), [16]),
    "not told": ({}, range(4), []),
    "nothing sensible": ({"node0/cpulist": "zero\n", "node1/cpulist": "0-3\n"}, range(4), [4]),
}  # fmt: skip


@pytest.mark.parametrize("case", NODES)
def test_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    files, allowed, sizes = NODES[case]
    monkeypatch.setattr(usable_cores, "allowed", lambda: list(allowed))
    found = usable_cores.nodes(tree(tmp_path, {**files, "has_cpu": "0\n", "possible": "0-1\n"}))
    assert [len(node) for node in found] == sizes
    assert set().union(*found) <= set(allowed)


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable_cores, "allowed", lambda: [0, 1, 4, 5])
    monkeypatch.setattr(usable_cores, "nodes", lambda: [{0, 1}, {4, 5}])
    everywhere = (-1, frozenset({0, 1, 4, 5}))
    assert usable_cores.places("NO", 4) == [everywhere] * 4
    assert usable_cores.places("YES", 4) == [(core, frozenset({core})) for core in (0, 1, 4, 5)]
    # Two processes under a quota would otherwise both take the first cores.
    assert usable_cores.places("YES", 2) == [everywhere] * 2
    assert usable_cores.places("NUMA", 4) == [(-1, frozenset({0, 1}))] * 2 + [(-1, frozenset({4, 5}))] * 2
    monkeypatch.setattr(usable_cores, "nodes", lambda: [{0, 1, 4, 5}])
    assert usable_cores.places("NUMA", 4) == usable_cores.places("YES", 4)


# Processors with cores of two kinds


def test_kinds_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux shows an i9-12900K: eight cores of two threads, eight small ones."""
    tree(tmp_path, {"cpu_core/cpus": "0-15\n", "cpu_atom/cpus": "16-23\n"})
    monkeypatch.setattr(build_options, "_KINDS", {
        "HIGH": tmp_path / "cpu_core" / "cpus", "LOW": tmp_path / "cpu_atom" / "cpus",
    })  # fmt: skip
    assert build_options._kind("HIGH") == set(range(16)) and build_options._kind("LOW") == set(range(16, 24))
    assert build_options._kind("ANY") == set()
    monkeypatch.setattr(build_options, "_KINDS", {})
    assert build_options._kind("HIGH") == set()


UNEVEN = r"""
typedef unsigned long long u64;
#define LOAD(p) __atomic_load_n(p, __ATOMIC_SEQ_CST)
#define ADD(p, v) __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST)
extern long syscall(long, ...);
extern int usleep(unsigned);
/* a[0][item] = who ran it. Thread a[1] is done with an item when the others have done four, and they do not run ahead,
   until all are begun. a[2]: items that were begun, by that thread, and by the others; a[3]: how many there are. */
__attribute__((visibility("default"))) void uneven(const u64* a, int begin, int end, int x, int y) {
#if defined(__x86_64__)
  int me = (int)syscall(186);
#else
  int me = (int)syscall(178);
#endif
  int *begun = (int*)a[2], *slow = begun + 1, *others = begun + 2, all = (int)a[3], is_slow = me == (int)a[1];
  ADD(begun, end - begin);
  for (; begin < end; begin++) {
    usleep(150); /* longer than 100 us: items are taken one by one */
    if (is_slow) {
      int wanted = 4 * ADD(slow, 1);
      while (LOAD(others) < wanted && LOAD(begun) < all) usleep(50);
    } else {
      int done = ADD(others, 1);
      while (done > 4 * LOAD(slow) + 8 && LOAD(begun) < all) usleep(50);
    }
    ((int*)a[0])[begin] = me;
  }
}
"""


@native
def test_slow_cores_take_less() -> None:
    """All cores of a hybrid processor work, each as much as it can: parts are equal, but who is done helps others."""
    me, who, seen = threading.get_native_id(), np.zeros(400, np.int32), np.zeros(3, np.int32)
    words, (begin,) = table_of([(loaded(UNEVEN).address("uneven"), (400,), 4)], 2)
    words[begin : begin + 4] = who.ctypes.data, me, seen.ctypes.data, 400
    runner = crowded().runner(words)
    for _ in range(2):  # in the second one it is known what an item takes
        seen[:] = 0
        runner()
        assert who.all()
        assert 0.1 < (who == me).mean() < 0.3, "the slow one has a fifth of the work"


# Where time is rationed


@native
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_nobody_spins_under_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processor time of workers while runs come a millisecond apart, which others would spin through."""
    monkeypatch.setattr(pool, "SPIN", 5000)

    def spent(made: ThreadPool, before: set[str]) -> float:
        table = Table([(2000,)], 2, burn=300)
        runner = made.runner(table.words)
        runner()
        mine = [t for t in Path("/proc/self/task").iterdir() if t.name not in before]

        def total() -> int:
            return sum(int((t / "schedstat").read_text().split()[0]) for t in mine)

        begin = total()
        for _ in range(300):
            runner()
            time.sleep(0.001)
        return (total() - begin) / 300e3  # us each time

    found = {}
    for share in (None, 2.0):
        monkeypatch.setattr(usable_cores, "quota", lambda share=share: share)
        monkeypatch.setattr(usable_cores, "count", lambda: 2)
        before = {t.name for t in Path("/proc/self/task").iterdir()}
        found[share] = spent(ThreadPool(thread_pool, "NO"), before)
    assert found[2.0] < found[None] - 100, found
