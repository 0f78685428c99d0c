"""The threads of a model's streams: tasks that come late, and streams whose number changes meanwhile."""

from __future__ import annotations

import threading
import time

import pytest

from tunewright.runtime.requests.streams import Streams, TaskQueue


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_task_that_comes_after_the_end_is_run(count: int) -> None:
    """Who has asked for the streams just before their number changed puts a task where all threads have ended."""
    work = TaskQueue(count)
    for _ in range(20):
        done = threading.Barrier(count + 1)
        for _ in range(count):
            work.put(lambda wait=done.wait: wait(120))
        done.wait(120)
        work.end()
        deadline = time.monotonic() + 120
        while work.threads and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not work.threads and not work.asleep


@pytest.mark.parametrize("rung", [False, True])
def test_a_thread_that_wakes_as_it_is_called_is_counted_once(rung: bool) -> None:
    """Its doze may be over before its bell is rung, or while nobody rings it."""
    work, bell = TaskQueue(1), threading.Lock()
    bell.acquire()
    work.bells.append(bell)
    work.dozing += 1
    if rung:
        work._ring()
    assert work.asleep == 1
    work._awake(bell, False, True)
    assert (work.asleep, work.called, work.dozing) == (0, 0, 0)
    assert not bell.acquire(blocking=False), "the next ring is waited for"


def test_no_task_is_lost_while_the_number_of_streams_changes() -> None:
    streams, stop, done, lock = Streams(2), threading.Event(), [], threading.Lock()
    total, submitters = 400, 3

    def task() -> None:
        with lock:
            done.append(1)

    def submit() -> None:
        for number in range(total):
            streams.submit(task)
            if number % 5 == 0:
                time.sleep(0.0002)

    def change() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            streams.resize(1 + number % 3)
            time.sleep(0.0003)

    threads, chaos = [threading.Thread(target=submit) for _ in range(submitters)], threading.Thread(target=change)
    for thread in [*threads, chaos]:
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    chaos.join(60)
    deadline = time.monotonic() + 120
    while len(done) < total * submitters and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(done) == total * submitters


def test_who_dozes_wakes_by_itself() -> None:
    """Also where another thread was faster with what it was called for."""
    work, done = TaskQueue(2), []
    for _ in range(500):
        with work.lock:
            work.helped = True  # so that whoever finds nothing dozes, as long as tasks are brief
        for _ in range(2):
            work.put(lambda: done.append(1))
    deadline = time.monotonic() + 120
    while (len(done) < 1000 or work.dozing or work.called) and time.monotonic() < deadline:
        time.sleep(0.001)
    with work.lock:
        assert len(done) == 1000 and not (work.dozing or work.called or work.tasks)
        assert work.asleep == len(work.threads) == len(work.bells)
    work.end()
