"""Control rows of tables: loops, branches and moved addresses, bounded and interruptible (`launch_table.c`)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from native.harness import crowded, loaded, native
from tunewright.devices.native import table_format
from tunewright.devices.native.pool import Runner
from tunewright.devices.native.table_format import Argument, Label, Listing, RowCode, TableCell

pytestmark = native


class Program:
    """A table under construction, with arrays for its kernels and variables for its loops."""

    def __init__(self) -> None:
        self.listing, self.kept = Listing(), list[np.ndarray]()
        self.zero, self.left, self.true = self.listing.cell(), self.listing.cell(10**6, 2), self.address([True], bool)

    def address(self, values: object, dtype: type) -> TableCell:
        """A variable with the address of an array."""
        self.kept.append(np.array(values, dtype))
        return self.listing.cell(self.kept[-1].ctypes.data)

    def count(self, items: int, into: np.ndarray | None = None) -> np.ndarray:
        """A kernel that counts how often each of its items ran."""
        made = np.zeros(items, np.int32) if into is None else into
        step = self.listing.kernel(loaded().address("count"), (items,), 2)
        self.kept.append(made)
        self.initial[step, 0] = made.ctypes.data
        return made

    @property
    def initial(self) -> dict[tuple[int, int], int]:
        return self.__dict__.setdefault("_initial", {})

    def loop(
        self, limit: TableCell | int, condition: TableCell, body: Callable[[TableCell], None], whole: int = 0
    ) -> TableCell:
        listing, counter, out = self.listing, self.listing.cell(), Label()
        listing.move(self.zero, [counter])
        head = listing.control(RowCode.LOOP, out, counter, limit, condition, self.left, whole, 0)
        body(counter)
        listing.control(RowCode.AGAIN, head, counter)
        listing.place(out)
        return counter

    def unless(self, condition: TableCell, then: Callable[[], None], other: Callable[[], None]) -> None:
        there, end = Label(), Label()
        self.listing.control(RowCode.UNLESS, there, condition)
        then()
        self.listing.control(RowCode.JUMP, end)
        self.listing.place(there)
        other()
        self.listing.place(end)

    def link(self, limit: int = 8, times: np.ndarray | None = None) -> tuple[table_format.Linked, Runner]:
        linked = self.listing.link(limit)
        for (step, index), value in self.initial.items():
            linked.table[linked.number(Argument(step, index))] = value
        return linked, crowded().runner(linked.table, times)


@pytest.mark.parametrize("slice", [0, 50_000])
@pytest.mark.parametrize("limit", [1, 8])
@pytest.mark.parametrize("items", [1, 5, 30_000])
@pytest.mark.parametrize("outer, inner", [(0, 3), (1, 1), (3, 0), (7, 5)])
def test_nested_loops(outer: int, inner: int, items: int, limit: int, slice: int) -> None:
    p = Program()
    first = p.count(items)
    made: list[np.ndarray] = []

    def body(_: TableCell) -> None:
        made.append(p.count(items))
        p.loop(p.address([inner], np.int64), p.true, lambda _: made.append(p.count(items)))
        made.append(p.count(3))

    p.loop(p.address([outer], np.int64), p.true, body)
    last = p.count(items)
    times = table_format.times(len(p.listing.rows))
    linked, runner = p.link(limit, times)
    runner._run.slice = slice
    for run in (1, 2, 3):
        runner()
        assert (first == run).all() and (last == run).all()
        assert [set(a.tolist()) for a in made] == [{run * outer}, {run * outer * inner}, {run * outer}]
        assert linked.table[linked.cells[p.left]] == 10**6 - run * outer * (1 + inner)
        counts = {step: int(n) for step, n in enumerate(times[2::2]) if p.listing.rows[step][0] > 64}
        assert list(counts.values()) == [1, outer, outer * inner, outer, 1]


def test_branches_and_moved_addresses() -> None:
    """A state between two buffers, and a row of its own for what each iteration made."""
    n, trips = 1000, 6
    p = Program()
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    one, two, rows = np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros((trips, n), np.float32)
    end = np.zeros(n, np.float32)
    state, to, spare = (p.listing.cell() for _ in range(3))
    row, bases = p.listing.cell(), [p.listing.cell(a.ctypes.data) for a in (x, one, two, rows, end)]
    for source, cell in zip(bases, (state, to, spare, row), strict=False):
        p.listing.move(source, [cell])

    def body(_: TableCell) -> None:
        step = p.listing.kernel(loaded().address("mix"), (n,), 3)
        p.initial[step, 2] = table_format.number(np.float32(0.25))
        at = len(p.listing.rows) - 1
        p.listing.rows.insert(at, (int(RowCode.MOVE), state, 0, 1, Argument(at + 2, 0)))
        p.listing.rows.insert(at + 1, (int(RowCode.MOVE), to, 0, 1, Argument(at + 2, 1)))
        p.initial[at + 2, 2] = p.initial.pop((step, 2))
        p.listing.control(RowCode.COPY, row, to, n * 4)
        p.listing.move(row, [row], n * 4)
        p.listing.move(to, [state])
        p.listing.move(spare, [to])
        p.listing.move(state, [spare])

    p.loop(p.address([trips], np.int64), p.true, body)
    p.unless(p.true, lambda: p.listing.control(RowCode.COPY, bases[4], state, n * 4), lambda: p.count(1))
    _, runner = p.link()
    for _ in range(3):
        rows[:] = end[:] = np.nan
        runner()
        expected = x
        for made in rows:
            expected = expected * np.float32(0.25) + expected[(np.arange(n, dtype=np.int64) * 7919 + 13) % n]
            np.testing.assert_allclose(made, expected, rtol=1e-6, atol=1e-6)
        assert (end == rows[-1]).all()


@pytest.mark.parametrize("value", [True, False])
def test_one_branch_runs(value: bool) -> None:
    p = Program()
    made = [np.zeros(40, np.int32), np.zeros(40, np.int32)]
    condition = p.address([value], bool)
    p.unless(condition, lambda: p.count(40, made[0]), lambda: p.count(40, made[1]))
    _, runner = p.link()
    for run in (1, 2):
        runner()
        assert set(made[not value]) == {run} and not made[value].any()
    p.kept[1][0] = not value
    runner()
    assert set(made[value]) == {1} and set(made[not value]) == {2}


@pytest.mark.parametrize("limit", [-5, 0, 3])
def test_the_condition_is_read_at_each_iteration(limit: int) -> None:
    """A limit below zero is none at all; a condition ends a loop without a limit."""
    p = Program()
    made = np.zeros(7, np.int32)
    p.loop(p.address([limit], np.int64), p.true, lambda _: p.count(7, made))
    off = p.address([False], bool)
    p.loop(0, off, lambda _: p.count(7, made))
    p.link()[1]()
    assert set(made) == {max(0, limit)}


@pytest.mark.parametrize("body", ["", "a kernel", "a kernel without items", "kernels of many items"])
@pytest.mark.parametrize("limit", [1, 8])
def test_an_endless_loop_comes_back_and_can_be_given_up(limit: int, body: str) -> None:
    p = Program()
    p.listing.cells[1].value = 2**63
    items = {"": 0, "a kernel": 1, "a kernel without items": 0, "kernels of many items": 20_000}[body]
    p.loop(0, p.true, lambda _: p.count(items) if body else None)
    _, runner = p.link(limit)
    runner._run.slice = 2000
    for _ in range(3):
        for _ in range(4):
            begin = time.perf_counter()
            assert runner.again() == 1
            assert time.perf_counter() - begin < 30  # endless otherwise
        runner.cancel()
    before = [array.copy() for array in p.kept]
    time.sleep(0.01)
    assert all((a == b).all() for a, b in zip(before, p.kept, strict=True))


@pytest.mark.parametrize("whole", [0, 1])
def test_iterations_are_bounded(whole: int) -> None:
    p = Program()
    p.listing.cells[1].value = 10
    p.count(1)
    made = np.zeros(7, np.int32)
    p.loop(p.address([4], np.int64), p.true, lambda _: p.count(7, made))
    second = p.loop(p.address([100], np.int64), p.true, lambda _: p.count(7, made), whole)
    after = p.count(1)
    linked, runner = p.link()
    runner()
    left = linked.cells[p.left]
    assert linked.table[left + 1] and p.listing.rows[int(linked.table[left + 1]) - 1][0] == RowCode.LOOP
    assert p.listing.rows[int(linked.table[left + 1]) - 1][2] is second and not after.any()
    assert set(made) == {4 if whole else 10} and linked.table[left] == (6 if whole else 0)


def test_more_loops_than_slots() -> None:
    """Eighty runs at once, of which some have no slot, in slices."""
    wrong: list[object] = []
    go = threading.Barrier(80)

    def turns(seed: int) -> None:
        try:
            p = Program()
            made = p.count(seed + 1)
            p.loop(p.address([50], np.int64), p.true, lambda _: p.count(seed + 1, made))
            runner = p.link(1 + seed % 8)[1]
            runner._run.slice = (0, 20, 50_000)[seed % 3]
            go.wait()
            for run in range(1, 20):
                runner()
                if set(made) != {run * 51}:
                    wrong.append((seed, made.tolist()))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=turns, args=(seed,)) for seed in range(80)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_a_forked_child_begins_a_loop_anew() -> None:
    p = Program()
    made = np.zeros(3, np.int32)
    first = p.count(2)
    p.loop(p.address([2000], np.int64), p.true, lambda _: p.count(3, made))
    linked, runner = p.link(1)
    linked.table[linked.number(Argument(0, 1))] = 1000
    runner._run.slice = 0
    assert runner.again() == 1
    child = os.fork()
    if not child:
        right = False
        try:
            crowded()._forked()
            first[:] = made[:] = 0
            runner()
            right = set(made) == {2000} and set(first) == {1}
        finally:
            os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    runner()
    assert set(made) == {2000} and set(first) == {1}
