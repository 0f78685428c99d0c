"""What isolation costs: candidates that take about 10 ms, attempted in this process and in a worker, in turns.

Every repetition poses the problem anew, so kernels are checked and timed again, but compiled once: compiling takes the
same time in both, and would hide the difference. ``--json`` prints one object.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

from tunewright.ir.types import DType, TensorType
from tunewright.measure.base import Attempt, Candidate, Measurer
from tunewright.measure.isolated import Isolated
from tunewright.measure.local import LocalMeasurer
from tunewright.plugins.single import open_device
from tunewright.search.base import Status
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tuning.tuner import Tuner

#: how long a candidate should take
WANTED = 10e-3


def product(size: int) -> Problem:
    type = TensorType(DType.FLOAT32, (size, size))
    return Problem("MatMul", (type, type), (type,), {}, constant=(False, False))


def candidates(problem: Problem, device_name: str, most: int) -> list[Candidate]:
    """The default, and others from the space of its solver."""
    device = open_device(device_name)
    solver = Tuner(Settings()).ask(problem, device)[0][0]
    configs = [solver.default(problem, device.target), *solver.space(problem, device.target)]
    return [(solver.id, config) for config in configs[:most]]


def attempts(measurer: Measurer, problem: Problem, who: list[Candidate]) -> tuple[float, list[Attempt]]:
    """Seconds that it takes to attempt them, and what came of it."""
    refusal = measurer.pose(problem)
    assert refusal is None, refusal
    began = time.perf_counter()
    found = [measurer.attempt(candidate) for candidate in who]
    took = time.perf_counter() - began
    assert all(a.status is Status.OK for a in found), found
    return took, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--candidates", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    local, isolated = LocalMeasurer(open_device(given.device)), Isolated(given.device, 60.0)
    began = time.perf_counter()
    isolated.pose(product(8))
    start = time.perf_counter() - began
    size, seconds = 128, 0.0
    while seconds < WANTED:
        size += size // 8
        who = candidates(product(size), given.device, 1)
        seconds = median(attempts(local, product(size), who)[1][0].samples)
    problem, who = product(size), candidates(product(size), given.device, given.candidates)
    attempts(local, problem, who)  # compiles
    attempts(isolated, problem, who)
    ratios, times = [], []
    for turn in range(given.rounds):
        order = [local, isolated] if turn % 2 else [isolated, local]
        took = {measurer: attempts(measurer, problem, who) for measurer in order}
        ratios.append(took[isolated][0] / took[local][0])
        pairs = zip(took[isolated][1], took[local][1], strict=True)
        times += [median(a.samples) / median(b.samples) for a, b in pairs]
    isolated.close()
    found = {
        "kernel_ms": seconds * 1e3, "size": size, "candidates": len(who), "start_seconds": start,
        "isolated_over_local": median(ratios), "ratios": sorted(ratios), "times_over_local": median(times),
    }  # fmt: skip
    if given.json:
        print(json.dumps(found))
        return
    print(f"{len(who)} candidates of {seconds * 1e3:.1f} ms ({size} x {size}), {given.rounds} turns")
    print(f"attempts in a worker take {median(ratios):.3f} times as long ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"times that they report are {median(times):.3f} times those in this process")
    print(f"a worker starts, and takes its first problem, in {start:.2f} s")


if __name__ == "__main__":
    main()
