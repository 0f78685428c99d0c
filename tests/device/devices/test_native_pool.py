"""The thread pool: every item once, steps in order, so many threads as allowed, the caller's mode as it was."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from native.harness import MODE, Table, crowded, loaded, native, stress_text, table_of
from tunewright.devices.native import compiler, pool, table_format
from tunewright.devices.native.objects import SharedObject
from tunewright.errors import DeviceError

pytestmark = native
#: what the pool leaves to a caller whose mode is 0x5f80 (rounding up) or 0x1f80
MODES = (0x1F80, 0x5F80, 0xFF80)
COSTS = (0, 1, 1000, 10**6, 10**9)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("limit", [1, 2, 3, 8])
def test_every_item_runs_once(limit: int, cost: int) -> None:
    rng = random.Random(limit * 100 + cost)
    for _ in range(30):
        grids: list[tuple[int, ...]] = [(rng.choice((1, 5, 1000, 20_000)),)]
        for _ in range(rng.randint(0, 9)):
            grids.append(tuple(rng.choice((0, 1, 2, 3, 7, 31)) for _ in range(rng.randint(1, 3))))
        rng.shuffle(grids)
        table = Table(grids, limit)
        table.know(cost)
        runner = crowded().runner(table.words)
        for times in (1, 2, 3):
            runner()
            assert table.each_ran(times)
        ran = table.words[[begin - 2 for begin in table.begins]] > 0
        assert (table.costs[ran] > 0).all() and (cost < 10**9 or (table.costs[ran] <= cost).all())


def test_items_know_their_place_in_the_grid() -> None:
    for grid in ((5,), (3, 4), (3, 4, 5), (1, 1, 7), (999, 2)):
        table = Table([grid], kernel="place")
        crowded().runner(table.words)()
        x, y, z = (*grid, 1, 1)[:3]
        expected = [i + 1000 * j + 1_000_000 * k for k in range(z) for j in range(y) for i in range(x)]
        assert table.written[0].tolist() == expected


def test_a_step_sees_everything_of_the_one_before() -> None:
    """The same numbers as in numpy, through forty steps."""
    for limit, n in ((1, 100), (2, 5000), (8, 1001), (8, 3)):
        arrays = [np.random.default_rng(n).standard_normal(n).astype(np.float32)]
        arrays += [np.empty(n, np.float32) for _ in range(40)]
        words, begins = table_of([(loaded().address("mix"), (n,), 3)] * 40, limit)
        for begin, source, to in zip(begins, arrays, arrays[1:], strict=False):
            words[begin : begin + 3] = source.ctypes.data, to.ctypes.data, table_format.number(np.float32(0.5))
        runner = crowded().runner(words)
        for _ in range(20):
            runner()
            expected = arrays[0]
            for made in arrays[1:]:
                expected = expected * np.float32(0.5) + expected[(np.arange(n, dtype=np.int64) * 7919 + 13) % n]
                np.testing.assert_allclose(made, expected, rtol=1e-6, atol=1e-6)
                expected = made.copy()
                made[:] = np.nan


def test_who_comes_back_waits_for_nobody_who_is_elsewhere() -> None:
    """Threads that have run something and do other things since, or are gone, hold up no one."""
    tables = [Table([(7,)], 1) for _ in range(5)]
    over, there = threading.Event(), threading.Barrier(5)

    def once(table: Table) -> None:
        crowded().runner(table.words)()
        there.wait(60)
        over.wait(60)

    threads = [threading.Thread(target=once, args=(table,)) for table in tables[1:]]
    for thread in threads:
        thread.start()
    there.wait(60)
    runner = crowded().runner(tables[0].words)
    for times in range(1, 51):
        runner()
        assert tables[0].each_ran(times)
    over.set()
    for thread in threads:
        thread.join(60)
    runner()
    assert tables[0].each_ran(51) and all(table.each_ran(1) for table in tables[1:])


def test_times_of_steps() -> None:
    """Each step ran once and took some time; together they took no longer than the run."""
    table = Table([(1000,), (1,), (0,), (20_000,)], burn=50)
    times = table_format.times(4)
    runner = crowded().runner(table.words, times)
    for _ in range(5):
        before = crowded().ticks()
        runner()
        whole = crowded().ticks() - before
        assert times[2::2].tolist() == [1, 1, 1, 1] and times[[1, 3, 7]].all()
        assert times[1::2].sum() <= whole and before <= times[0] - times[1::2].sum()


def test_who_slept_through_a_long_first_step_is_called_for_short_ones() -> None:
    """Steps that are too short to wake somebody for are worth it together."""
    table, pool = Table([(1,), *[(4,)] * 1500], 2), crowded()
    table.words[[begin + 1 for begin in table.begins]] = [1_000_000, *[5_000] * 1500]
    runner = pool.runner(table.words)
    runner()
    assert table.costs[1:].max() * 4 / 1024 < 100 * pool.ticks_per_us, "this machine is too slow"
    helped = []
    for _ in range(30):
        time.sleep(0.01)  # workers fall asleep
        before = sum(map(_processor_time, _workers()))
        begin = time.perf_counter()
        runner()
        helped.append((sum(map(_processor_time, _workers())) - before) / (time.perf_counter() - begin))
        if helped[-1] > 0.3:
            return
    pytest.fail(f"workers helped for {max(helped):.0%} of the time")


def _workers() -> list[int]:
    """The threads of all pools."""
    tasks = Path("/proc/self/task")
    return [int(task.name) for task in tasks.iterdir() if (task / "comm").read_text().startswith("tunewright-0")]


def _processor_time(thread: int) -> float:
    return time.clock_gettime((~thread << 3) | 6)  # CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED


@pytest.mark.parametrize("slice", [0, 1, 50])
@pytest.mark.parametrize("limit", [1, 2, 8])
def test_runs_in_slices(slice: int, limit: int) -> None:
    table = Table([(1,), (3000,), (0,), (17,), (1,)] * 3, limit, burn=20)
    runner = crowded().runner(table.words)
    runner._run.slice = slice
    calls = 0
    for times in (1, 2):
        while runner.again():
            calls += 1
        assert table.each_ran(times)
    assert calls > 4 or slice > 1 or limit > 1  # the others may do it all before the caller has a core


def test_a_run_that_is_expected_begins_when_it_is_called() -> None:
    table = Table([(5,), (3000,), (17,)], burn=20)
    runner = crowded().runner(table.words)
    for times in range(5):
        runner.expect()
        time.sleep(0.001 * times)  # workers look for it, or sleep again
        assert table.each_ran(times)
        runner()


def test_the_cost_of_a_step_follows_when_it_gets_more_to_do() -> None:
    """A cache grows from call to call: what its first rows took says little of later ones."""
    table = Table([(8,)], 1)
    runner = crowded().runner(table.words)

    def learned(burn: int) -> int:
        table.words[table.begins[0] + 1] = burn
        for _ in range(100):
            runner()
        return int(table.costs[0])

    short, long, again = learned(100), learned(100_000), learned(100)
    assert long > 50 * short and again < 2 * short + 1000


def test_short_steps_come_back_in_between() -> None:
    """A step of less than 100 us runs in the calling thread at once; so many of them do not run in one call."""
    table = Table([(1,)] * 400, 1, burn=20_000)
    runner = crowded().runner(table.words)
    runner()
    assert 0 < table.costs.min() / 1024 < 100 * crowded().ticks_per_us
    runner._run.slice, calls = 50, 0
    while runner.again():
        calls += 1
    assert table.each_ran(2) and calls >= 3


def test_more_runs_than_slots() -> None:
    """Ninety threads at once, of whom some find no slot, some give up, and some are in slices."""
    wrong: list[object] = []
    go = threading.Barrier(90)

    def turns(seed: int) -> None:
        rng = random.Random(seed)
        try:
            go.wait()
            for _ in range(12):
                grids = [(rng.choice((0, 1, 40, 700)),) for _ in range(rng.randint(1, 8))]
                table = Table(grids, rng.randint(1, 8), burn=30)
                runner = crowded().runner(table.words)
                runner._run.slice = rng.choice((0, 1, 100, 50_000))
                patience = rng.choice((10**9, 10**9, 3))
                while runner.again():
                    patience -= 1
                    if not patience:
                        runner.cancel()
                        break
                if patience > 0 and not table.each_ran(1):
                    wrong.append((seed, [w.tolist() for w in table.written]))
                elif max(w.max() for w in table.written) > 1:
                    wrong.append((seed, "twice"))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=turns, args=(seed,)) for seed in range(90)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not wrong and not any(thread.is_alive() for thread in threads)


#: by slots; their workers never end
STRESS: dict[int, SharedObject] = {}


@pytest.fixture(params=[64, 2], ids=["", "two slots"])
def stress(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """With so many slots; runs beyond them are those of the calling thread alone."""
    if request.param not in STRESS:
        STRESS[request.param] = SharedObject(compiler.find().build(stress_text(request.param), []))
    return STRESS[request.param].library


often = pytest.mark.parametrize("times", [1, pytest.param(100, marks=pytest.mark.soak)])
POOLS = [
    (3, 400, 8, 7, 0), (3, 400, 2, 2, 50), (1, 1000, 8, 7, 20), (100, 20, 4, 3, 5), (4, 200, 1, 0, 0),
    (2, 300, 64, 70, 1),
]  # fmt: skip


@often
@pytest.mark.parametrize("threads, runs, cores, workers, spin", POOLS)
def test_random_tables_in_c(
    stress: ctypes.CDLL, threads: int, runs: int, cores: int, workers: int, spin: int, times: int
) -> None:
    """See pool_stress.c; what it returns names what went wrong (there a run with too many threads is wrong, too)."""
    told = (ctypes.c_uint64 * 3)()
    for seed in (1, 2):  # each has a pool of its own, whose threads stay
        spin_, seed_ = ctypes.c_uint64(spin), ctypes.c_uint64(seed * times)
        assert not stress.pool_stress(threads, runs * times, cores, workers, spin_, seed_, told)
    finished, cancelled, slices = told
    assert finished + cancelled == 2 * threads * runs * times and slices > cancelled > 0


@often
@pytest.mark.parametrize("threads, runs, cores, workers, spin", POOLS)
def test_random_control_flow_in_c(
    stress: ctypes.CDLL, threads: int, runs: int, cores: int, workers: int, spin: int, times: int
) -> None:
    """See control_stress.c: nested loops and branches leave what they leave when one thread goes through them."""
    told = (ctypes.c_uint64 * 3)()
    runs = max(1, runs // 4) * times
    spin_, seed_ = ctypes.c_uint64(spin), ctypes.c_uint64(3 * times)
    assert not stress.control_stress(threads, runs, cores, workers, spin_, seed_, told)
    finished, cancelled, slices = told
    assert finished + cancelled == 3 * threads * runs and slices > cancelled > 0


# The caller's floating point


@pytest.fixture
def mode() -> Iterator[ctypes.CDLL]:
    library = loaded(MODE).library
    before = library.get_mode()
    yield library
    library.set_mode(before or 0x1F80)


def mixed(x: np.ndarray, limit: int, by: float) -> tuple[pool.Runner, np.ndarray]:
    to = np.empty_like(x)
    words, (begin,) = table_of([(loaded().address("mix"), (len(x),), 3)], limit)
    words[begin : begin + 3] = x.ctypes.data, to.ctypes.data, table_format.number(np.float32(by))
    runner = crowded().runner(words)
    return runner, to


@pytest.mark.parametrize("limit", [1, 8])
def test_denormals_are_zero_inside_alone(mode: ctypes.CDLL, limit: int) -> None:
    tiny = np.full(6_000_000, 1e-39, np.float32)  # a step of more than 100 us: a shorter one is not divided into slices
    runner, to = mixed(tiny, limit, 0.5)
    slices = 0
    for slice in (50_000, 0):
        runner._run.slice = slice
        for inside in MODES[:2]:
            to[:] = 1
            mode.set_mode(inside)
            while runner.again():
                slices += 1
                assert mode.get_mode() == inside
            after = mode.get_mode()
            mode.set_mode(0x1F80)
            assert after == inside and not to.any()
            assert (tiny * np.float32(0.5) > 0).all(), "the caller's denormals are flushed"
    assert slices or limit > 1  # the others may do it all before the caller has a core


@pytest.mark.parametrize("limit", [1, 8])
def test_the_callers_rounding_changes_nothing(mode: ctypes.CDLL, limit: int) -> None:
    x = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    runner, to = mixed(x, limit, 1 / 3)
    found = set()
    for each in MODES:
        mode.set_mode(each)
        runner()
        mode.set_mode(0x1F80)
        found.add(to.tobytes())
    assert len(found) == 1


def test_the_mode_is_back_behind_a_run_that_is_cancelled(mode: ctypes.CDLL) -> None:
    table = Table([(2000,)] * 20, 1, burn=200)
    runner = crowded().runner(table.words)
    mode.set_mode(0x5F80)
    runner._run.slice = 10
    assert runner.again() == 1 and mode.get_mode() == 0x5F80
    runner.cancel()
    assert mode.get_mode() == 0x5F80 and not table.each_ran(1)


class Stop(Exception):
    pass


@pytest.mark.parametrize("limit", [1, 8])
def test_an_exception_ends_a_run(mode: ctypes.CDLL, limit: int) -> None:
    """What is left is not run, nobody runs anything any more, and the next time all is run."""
    table = Table([(2000,)] * 20, limit, burn=200)
    runner = crowded().runner(table.words)
    mode.set_mode(0x5F80)
    runner._run.slice = 10
    again, calls = runner.again, []

    def interrupted() -> int:
        calls.append(again())
        raise Stop

    runner.again = interrupted
    with pytest.raises(Stop):
        runner()
    ran = [array.copy() for array in table.written]
    assert mode.get_mode() == 0x5F80 and calls in ([1], [0]) and (calls == [1] or limit > 1)
    assert table.each_ran(1) if calls == [0] else limit > 1 or not table.each_ran(1)  # the others may do it all
    time.sleep(0.01)
    assert all((a == b).all() for a, b in zip(ran, table.written, strict=True))
    for array in table.written:
        array[:] = 0
    runner.again = again
    runner()
    assert table.each_ran(1) and mode.get_mode() == 0x5F80


# What is refused, and what is said of workers


@pytest.mark.soak
def test_random_tables_on_aarch64(tmp_path: Path) -> None:
    """The same in an emulator: it does not reorder as much as such a processor may."""
    zig, emulator = compiler._zig_of_wheel(), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if zig is None or emulator is None:
        pytest.skip("needs the package ziglang, which brings a C library, and qemu-user")
    (tmp_path / "stress.c").write_text(stress_text(), encoding="utf-8")
    program, caches = tmp_path / "stress", {f"ZIG_{name}_CACHE_DIR": str(tmp_path) for name in ("GLOBAL", "LOCAL")}
    flags = ["-target", "aarch64-linux-musl", "-static", "-O2", "-w", "-DMAIN=20"]
    subprocess.run([zig, "cc", *flags, tmp_path / "stress.c", "-o", program], env={**os.environ, **caches}, check=True)
    done = subprocess.run([emulator, program], capture_output=True, text=True, timeout=600, check=False)
    assert not done.returncode and "wrong 0" in done.stdout, done.stdout + done.stderr


def test_too_many_items_are_refused() -> None:
    with pytest.raises(DeviceError, match="work-items"):
        table_of([(1, (1 << 16, 1 << 16), 0)], 1)


def workers() -> list[Path]:
    """Threads of this process that are workers of some pool: `start` returns when they have their names."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread of another test has just ended
            if (task / "comm").read_text().startswith("tunewright-0"):
                found.append(task)
    return found


def test_workers_have_names_and_no_signals() -> None:
    crowded()
    found = workers()
    for task in found:
        blocked = next(line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk"))
        everything = int(blocked.split()[1], 16)
        for signal in range(1, 65):  # but what cannot be blocked, and what the C library keeps for itself
            assert everything >> (signal - 1) & 1 or signal in (9, 19, 32, 33), signal
    assert len(found) >= 8


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_workers_are_bound_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunewright.devices.native import usable_cores as cores

    others = set(workers())  # those of the process's own pool are among them
    made = crowded(3)

    def usable() -> list[frozenset[int]]:
        return [frozenset(os.sched_getaffinity(int(t.name))) for t in workers() if t not in others]

    there = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(cores, "places", lambda mode, workers: [(there[0], frozenset(there[:1]))] * workers)
    made.bind("YES")
    assert usable().count(frozenset(there[:1])) >= 3
    monkeypatch.undo()
    made.bind("NO")
    assert frozenset(there[:1]) not in usable() or len(there) == 1
    table = Table([(5000,)], 3)
    made.runner(table.words)()
    assert table.each_ran(1)
