"""What an asynchronous request costs beside its inference: the goal is 60 us of Python at most.

A small model runs in short turns, interleaved: inferred (`infer`), started and waited for (`start_async`, `wait`), and
through a queue (`AsyncInferQueue`, a callback each). The overhead is the difference of the least times, and the median
of the differences to what was inferred in the same round; on a busy machine the former tells more.

    python bench/async_overhead.py
    python bench/async_overhead.py --device CPU --rounds 200 --json figures.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from onnx import parser

from tunewright import AsyncInferQueue, Core

NETWORK = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1, 16] x) => (float[1, 16] y)
{
    a = Mul(x, x)
    y = Relu(a)
}
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="CPU.HOST,CPU", help="devices, with commas between them")
    options.add_argument("--streams", type=int, default=1)
    options.add_argument("--requests", type=int, default=2, help="of the queue")
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--count", type=int, default=100, help="inferences of a turn")
    options.add_argument("--json", help="write the figures to a file")
    given = options.parse_args()
    report = {name: measure(name, given) for name in given.device.split(",")}
    for name, found in report.items():
        for what, (least, median) in found.items():
            print(f"{name:9} {what:22} {least:7.2f} us least {median:7.2f} us median")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


def measure(device: str, given: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Microseconds of a request, least and median over all rounds, by what was done."""
    config = {"NUM_STREAMS": given.streams}
    compiled = Core().compile_model(parser.parse_model(NETWORK), device, config)
    inputs = {"x": np.ones((1, 16), np.float32)}
    request, queue, got = compiled.create_infer_request(), AsyncInferQueue(compiled, given.requests), []
    queue.set_callback(lambda request, number: got.append(number))

    def infer() -> None:
        for _ in range(given.count):
            request.infer(inputs)

    def wait() -> None:
        for _ in range(given.count):
            request.start_async(inputs)
            request.wait()

    def queued() -> None:
        for number in range(given.count):
            queue.start_async(inputs, number)
        queue.wait_all()

    ways: dict[str, Callable[[], None]] = {"infer": infer, "start and wait": wait, "queue": queued}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.rounds + 2):
        for name, run in ways.items():
            begin = time.perf_counter()
            run()
            if number > 1:  # the first ones warm up
                times[name].append((time.perf_counter() - begin) / given.count * 1e6)
    if got != list(range(given.count)) * (given.rounds + 2) and given.streams == 1:
        raise SystemExit(f"{device}: callbacks were lost, or came in another order")
    found = {name: (min(turns), statistics.median(turns)) for name, turns in times.items()}
    for name in ("start and wait", "queue"):
        differences = [a - b for a, b in zip(times[name], times["infer"], strict=True)]
        found[f"overhead, {name}"] = found[name][0] - found["infer"][0], statistics.median(differences)
    return found


if __name__ == "__main__":
    main()
