"""What GPU_QUEUE_PRIORITY and GPU_QUEUE_THROTTLE do: latency beside other work, and processor time of waiting.

    python bench/gpu_queues.py                       # on GPU.0
    python bench/gpu_queues.py --device GPU.1 --seconds 2

A small network (a chain of products) is asked for one answer after the other, while another thread keeps
the GPU busy with a large one. Rounds of both settings take turns.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tunewright import Core
from tunewright.runtime.requests.compiled import InferRequest

#: rounds of each setting
ROUNDS = 6
#: columns of inputs and results
NARROW = 16


def chain(rows: int, width: int, layers: int) -> onnx.ModelProto:
    """Products one behind the other; the first and the last matrix are narrow, so that little is copied."""
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for n in range(layers):
        sizes = NARROW if n == 0 else width, NARROW if n == layers - 1 else width
        weight = (rng.standard_normal(sizes) / np.sqrt(sizes[0])).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{n}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{n}"], [f"m{n}"]))
        nodes.append(helper.make_node("Tanh", [f"m{n}"], [f"t{n}"]))
        last = f"t{n}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, NARROW]) for name in ("x", last)]
    graph = helper.make_graph(nodes, "chain", [ends[0]], [ends[1]], weights)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def request(model: onnx.ModelProto, device: str, config: Mapping[str, str]) -> tuple[InferRequest, dict[str, object]]:
    compiled = Core().compile_model(model, device, config)
    made = compiled.create_infer_request()
    shape = model.graph.input[0].type.tensor_type.shape.dim
    values = {"x": np.ones([d.dim_value for d in shape], np.float32)}
    made.infer(values)
    return made, values


def latencies(made: InferRequest, values: Mapping[str, object], seconds: float) -> list[float]:
    found, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        made.infer(values)
        found.append(time.perf_counter() - begin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="GPU.0")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each round (0.5)")
    options = parser.parse_args()
    small, large = chain(128, 768, 24), chain(8192, 4096, 12)
    busy, given = request(large, options.device, {})
    print("priority: latency of a small network while a large one keeps the GPU busy")
    rows = {level: request(small, options.device, {"GPU_QUEUE_PRIORITY": level}) for level in ("MEDIUM", "HIGH")}
    alone = statistics.median(latencies(*rows["MEDIUM"], options.seconds))
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            busy.infer(given)

    thread = threading.Thread(target=work)
    thread.start()
    seen: dict[str, list[float]] = {level: [] for level in rows}
    try:
        for _ in range(ROUNDS):
            for level, row in rows.items():
                seen[level] += latencies(*row, options.seconds)
    finally:
        stop.set()
        thread.join()
    print(f"  alone    {1e3 * alone:8.3f} ms")
    for level, found in seen.items():
        low, median, high = np.percentile(found, [10, 50, 90]) * 1e3
        print(f"  {level:8} {median:8.3f} ms ({low:.3f}..{high:.3f}, 10th to 90th of {len(found)})")
    print("throttle: processor time of waiting for the large network")
    throttled = {level: request(large, options.device, {"GPU_QUEUE_THROTTLE": level}) for level in ("MEDIUM", "LOW")}
    for level, row in throttled.items():
        begin, cpu = time.perf_counter(), time.process_time()
        found = latencies(*row, 2 * options.seconds)
        share = (time.process_time() - cpu) / (time.perf_counter() - begin)
        print(f"  {level:8} {1e3 * statistics.median(found):8.3f} ms, {100 * share:.0f} % of a core")


if __name__ == "__main__":
    main()
