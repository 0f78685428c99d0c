"""A process that is forked after kernels ran: both go on, whatever other threads did at that moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from native.children import NETWORK, python
from native.harness import native

pytestmark = native

FORKED = (
    NETWORK
    + """
import json, os, signal, sys, threading, time
def child(work):
    '''A forked process that ends well when `work` returns true; one that hangs is ended.'''
    number = os.fork()
    if number:
        return number
    try:
        signal.alarm(200)
        os._exit(0 if work() else 3)
    except BaseException:
        import traceback
        traceback.print_exc()
    os._exit(4)
def ended(children):
    return [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in children]
"""
)


@pytest.mark.parametrize("bind", ["YES", "NUMA", "NO"])
def test_workers_of_a_server_that_preloads(bind: str) -> None:
    """Device, model and a request are there before four processes are forked; each uses them, and loads more."""
    codes, right = python(
        FORKED
        + """
from tunewright.devices.native import usable_cores as cores
request = load()
assert right(request)
def work():
    mine = os.sched_getaffinity(0)
    fine = all(right(request) for _ in range(30)) and right(load()) and right(load(CPU_THREADS_NUM=1))
    names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    workers = [name for name in names if name.startswith("tunewright-0")]
    return fine and (cores.count() == 1 or len(workers) == cores.count()) and os.sched_getaffinity(0) == mine
children = [child(work) for _ in range(4)]
fine = all(right(request) for _ in range(30))
print(json.dumps([ended(children), fine and right(request)]))
""",
        TUNEWRIGHT_CPU_BIND_THREADS=bind,
    )
    assert codes == [0] * 4 and right


@pytest.mark.parametrize("forks", [12, pytest.param(300, marks=pytest.mark.soak)])
def test_fork_while_others_are_inside_runs(forks: int) -> None:
    codes, wrong = python(
        FORKED
        + """
requests, wrong, stop = [load() for _ in range(3)], [], threading.Event()
assert all(right(request) for request in requests)
def busy(request):
    while not stop.is_set():
        if not right(request):
            wrong.append(1)
threads = [threading.Thread(target=busy, args=(request,)) for request in requests[:2]]
for thread in threads:
    thread.start()
codes = []
for _ in range(int(sys.argv[1])):
    time.sleep(0.002)
    codes += ended([child(lambda: right(requests[2]) and right(load()))])
stop.set()
for thread in threads:
    thread.join()
print(json.dumps([codes, len(wrong) + (not right(requests[0]))]))
""",
        forks, timeout=900,
    )  # fmt: skip
    assert codes == [0] * forks and not wrong


def test_fork_in_the_middle_of_a_run() -> None:
    """By a handler of a signal: the run begins anew in the child, goes on in the parent, and both finish it."""
    codes, ran = python(
        FORKED
        + """
from native.harness import Table
from tunewright.plugins.single import open_device
pool, codes, parent = open_device("CPU").pool, [], os.getpid()
for limit in (1, 2):
    table = Table([(3000,), (5,), (3000,)], limit, burn=60_000)
    runner, children, runs = pool.runner(table.words), [], 0
    def handler(number, frame):
        if table.each_ran(runs) or table.each_ran(runs - 1):
            return  # it came between two runs
        child_number = os.fork()
        if child_number:
            children.append(child_number)
        else:
            signal.alarm(200)
    signal.signal(signal.SIGUSR1, handler)
    while not children and os.getpid() == parent:
        timer = threading.Timer(0.02, os.kill, (parent, signal.SIGUSR1))
        timer.start()
        while timer.is_alive() and os.getpid() == parent:
            runs += 1
            runner()
    if os.getpid() != parent:
        # what ran before the fork has run once more
        fine = all(((array == runs) | (array == runs + 1)).all() for array in table.written)
        short = Table([(2000,), (7,)], limit)
        pool.runner(short.words)()
        os._exit(0 if fine and short.each_ran(1) else 3)
    codes += ended(children)
    assert table.each_ran(runs)
print(json.dumps([codes, True]))
"""
    )
    assert codes == [0, 0] and ran


def test_multiprocessing() -> None:
    """With the method `fork`, from a thread, while kernels are used in another one."""
    assert python(
        FORKED
        + """
import multiprocessing
request, mine = load(), load()
assert right(request)
def work(_):
    return right(request)
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(3) as workers:
        found = workers.map_async(work, range(30))
        fine = all(right(mine) for _ in range(20))
        print(json.dumps(fine and all(found.get(200))))
"""
    )


def test_fork_while_kernels_are_compiled(tmp_path: Path) -> None:
    """The child compiles what its parent had begun: it has none of its threads."""
    codes, fine = python(
        FORKED
        + """
from tunewright.plugins.single import open_device
from tunewright.devices.native import compiler, programs
device, slow = open_device("CPU"), compiler.ClangCommands.build
def build(*arguments):
    time.sleep(0.05)
    return slow(*arguments)
compiler.ClangCommands.build = build
texts = [f"EXPORT void k{n}(const unsigned long long* a, int b, int e, int x, int y) {{}}".replace(
    "EXPORT", "#define EXPORT __attribute__((visibility(\\"default\\")))\\nEXPORT") for n in range(12)]
names = [f"k{n}" for n in range(12)]
def built():
    return all(device.build(text).entry(name) for text, name in zip(texts, names))
thread = threading.Thread(target=built)
thread.start()
device.begin_build(texts)
children = []
for _ in range(4):
    time.sleep(0.03)
    children.append(child(built))
codes = ended(children)
thread.join()
print(json.dumps([codes, built()]))
""",
        TUNEWRIGHT_CACHE_DIR=str(tmp_path / "kernels"),
    )
    assert codes == [0] * 4 and fine


@pytest.mark.parametrize("lock", ["programs", "device", "pool", "cache", "caches", "turns"])
def test_a_lock_that_another_thread_holds(lock: str, tmp_path: Path) -> None:
    """Whatever is locked in the parent at that moment is free in the child."""
    codes, fine = python(
        FORKED
        + """
from tunewright.plugins.single import open_device
from tunewright.devices import kernel_cache
request, device = load(), open_device("CPU")
assert right(request)
lock = {
    "programs": lambda: device._programs._lock, "device": lambda: device._lock, "pool": lambda: device.pool._lock,
    "cache": lambda: kernel_cache.current()._lock, "caches": lambda: kernel_cache._OPEN,
    "turns": lambda: device._programs._turns,
}[sys.argv[1]]()
held, over = threading.Event(), threading.Event()
def hold():
    with lock:
        held.set()
        over.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
def work():
    # a text that is new, so that it is compiled and stored
    new = parser.parse_model(text.replace("Tanh", "Sigmoid"))
    tunewright.Core().compile_model(new, "CPU")({"x": x, "w": w})
    return right(request) and right(load()) and right(load(CPU_THREADS_NUM=1))
codes = ended([child(work) for _ in range(2)])
over.set()
thread.join()
print(json.dumps([codes, right(load())]))
""",
        lock, TUNEWRIGHT_CACHE_DIR=str(tmp_path / "kernels"),
    )  # fmt: skip
    assert codes == [0, 0] and fine
