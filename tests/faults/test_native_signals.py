"""Ctrl-C and SIGTERM while kernels run: they come through at once, and everything works afterwards."""

from __future__ import annotations

import pytest

from native.children import NETWORK, python
from native.harness import native

pytestmark = native

#: runs of seconds on the device's own pool, in parts of 20 us, and something that they are to be torn out of
LONG = """
import json, os, random, signal, sys, threading, time
from native.harness import Table
from tunewright.plugins.single import open_device
pool = open_device("CPU").pool
late, threads, rng = [], [], random.Random(int(sys.argv[1]))
def queued():
    # seconds that the first thread has waited for a core: the work of other processes, not ours
    try:
        return int(open(f"/proc/self/task/{os.getpid()}/schedstat").read().split()[1]) / 1e9
    except OSError:
        return 0.0
def send(*signals):
    # a while from now; when that was, and for how long the first thread had been queued by then
    def soon():
        time.sleep(rng.uniform(0.05, 0.15))
        sent.append((time.perf_counter(), queued()))
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(rng.choice((0, 0.0001, 0.002)))
    sent = []
    threads.append(threading.Thread(target=soon))
    threads[-1].start()
    return sent
def all_sent():
    while threads:
        threads[-1].join()
        threads.pop()
def interrupted(limit, grids, burn, kind, *signals):
    table, runs = Table(grids, limit, burn=burn), 0
    runner = pool.runner(table.words)
    sent = send(*signals)
    try:
        while True:  # until the signal comes, however busy the machine is
            runs += 1
            runner()
    except kind:
        late.append(time.perf_counter() - sent[0][0] - (queued() - sent[0][1]))
    all_sent()
    assert runner._run.slot is None and max(array.max() for array in table.written) <= runs
    short = Table([(100,), (7,)], limit)
    pool.runner(short.words)()
    assert short.each_ran(1)
"""


#: one step of three seconds; steps of less than 100 us, which run in the calling thread; steps of a millisecond
SHAPES = {"one": (1, 150_000, 60_000), "short": (30_000, 1, 250_000), "many": (3000, 50, 60_000)}


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_ctrl_c_comes_through(shape: str, limit: int) -> None:
    steps, items, burn = SHAPES[shape]
    late = python(
        LONG
        + """
limit, steps, items, burn = map(int, sys.argv[1:])
for _ in range(5):
    interrupted(limit, [(items,)] * steps, burn, KeyboardInterrupt, signal.SIGINT)
print(json.dumps(late))
""",
        limit, steps, items, burn,
    )  # fmt: skip
    assert sorted(late)[2] <= 0.1, late


def test_handlers_run_between_slices() -> None:
    """SIGTERM with a handler that raises, one that does not, and one that infers itself."""
    late, inside, right = python(
        NETWORK
        + LONG
        + """
class Terminated(Exception):
    pass
def stop(number, frame):
    raise Terminated
signal.signal(signal.SIGTERM, stop)
for _ in range(3):
    interrupted(2, [(150_000,)], 60_000, Terminated, signal.SIGTERM)
calls, request = [], load()
def note(number, frame):
    inside = not table.each_ran(runs) and not table.each_ran(runs - 1)
    calls.append((inside, right(request)))
signal.signal(signal.SIGTERM, note)
table = Table([(40_000,)] * 4, 2, burn=60_000)
runner, runs = pool.runner(table.words), 0
while not any(inside for inside, _ in calls):  # it may come between two runs
    before = len(calls)
    send(signal.SIGTERM)
    while len(calls) == before:
        runs += 1
        runner()
    all_sent()
    assert table.each_ran(runs) and len(calls) == before + 1
print(json.dumps([late, calls[-1][0], all(fine for _, fine in calls)]))
""",
        5,
    )
    assert sorted(late)[1] <= 0.1 and inside and right


def test_ctrl_c_twice() -> None:
    """The second one while the first one is handled: the run is given up all the same."""
    assert python(
        LONG
        + """
def twice():
    begun = False
    while True:  # the second one may come anywhere
        try:
            if not begun:
                begun = True
                interrupted(2, [(150_000,)], 60_000, KeyboardInterrupt, signal.SIGINT, signal.SIGINT)
            all_sent()
            return
        except KeyboardInterrupt:
            pass
for _ in range(25):
    twice()
table = Table([(20_000,)] * 3, 2)
pool.runner(table.words)()
assert table.each_ran(1) and len(late) > 5
print(json.dumps(True))
""",
        3,
    )


def test_ctrl_c_during_inferences() -> None:
    """Of a network, at random moments; results are right afterwards, on all threads."""
    assert python(
        NETWORK
        + """
import json, os, random, signal, threading, time
request, rng = load(), random.Random(0)
assert right(request)
for _ in range(40):
    def soon():
        time.sleep(rng.uniform(0.001, 0.02))
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=soon)
    try:
        thread.start()
        while True:
            request.infer({"x": x, "w": w})
    except KeyboardInterrupt:
        pass
    thread.join()
print(json.dumps(right(request) and right(load())))
"""
    )


def test_ctrl_c_while_kernels_are_compiled(tmp_path: object) -> None:
    """The compilers go on, and what was begun is there the next time."""
    assert python(
        NETWORK
        + """
import json, os, signal, threading, time
from tunewright.plugins.single import open_device
open_device("CPU")
try:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    load()
    while True:
        time.sleep(1)
except KeyboardInterrupt:
    print(json.dumps(right(load())))
""",
        TUNEWRIGHT_CACHE_DIR=str(tmp_path),
    )
