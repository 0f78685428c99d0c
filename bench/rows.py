"""Sizes that depend on data, beside ONNX Runtime: NonMaxSuppression, a detector's tail, NonZero, masked_select, Unique.

python bench/rows.py [--turns 9] [--only words of a name]

Both engines run in this process, in turns of about 0.15 s, with two threads each. Results are compared first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
from onnx import parser

from tunewright import Core

Feeds = dict[str, np.ndarray]
HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'
SUPPRESSED = """limit = Constant <value_ints = [%(limit)d]> ()
    overlap = Constant <value_floats = [0.5]> ()
    found = NonMaxSuppression(boxes, scores, limit, overlap, overlap)"""
NMS = (
    """g (float[1,%(count)d,4] boxes, float[1,%(classes)d,%(count)d] scores)
    => (int64[n,3] found) {"""
    + SUPPRESSED
    + "}"
)
TAIL = (
    """g (float[1,%(count)d,4] boxes, float[1,%(classes)d,%(count)d] scores)
    => (float[m,4] out, float[m] best, int64[m] label) {"""
    + SUPPRESSED
    + """
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    three = Constant <value_ints = [3]> ()
    image = Slice(found, zero, one, one)
    class = Slice(found, one, two, one)
    index = Slice(found, two, three, one)
    at = Squeeze(index, one)
    label = Squeeze(class, one)
    flat = Squeeze(boxes, zero)
    out = Gather(flat, at)
    places = Concat <axis = 1> (image, class, index)
    best = GatherND(scores, places)
}"""
)
NON_ZERO = "g (float[1000,1000] x) => (int64[2,n] y) { y = NonZero(x) }"
MASKED = """g (float[1000,1000] x) => (float[n] y) {
    half = Constant <value = float {0.5}> ()
    m = Greater(x, half)
    at = NonZero(m)
    turned = Transpose <perm = [1, 0]> (at)
    y = GatherND(x, turned)
}"""


SIZED = """g (float[8400] x, int64[1] k) => (float[n] y, int64[n] at) {
    most = Constant <value_ints = [300]> ()
    size = Min(k, most)
    best, at = TopK(x, size)
    y = Sigmoid(best)
}"""
UNIQUE = (
    "g (int64[10000] x) => (int64[n] y, int64[n] first, int64[10000] at, int64[n] counts) {"
    + """
    y, first, at, counts = Unique(x)
}"""
)


def detections(rng: np.random.Generator, count: int, classes: int) -> Feeds:
    low, size = rng.uniform(0, 600, (1, count, 2)), rng.uniform(10, 120, (1, count, 2))
    boxes, scores = np.concatenate([low, low + size], -1), rng.random((1, classes, count))
    return {"boxes": boxes.astype(np.float32), "scores": scores.astype(np.float32)}


def few(rng: np.random.Generator, count: int, classes: int, found: int) -> Feeds:
    """Boxes far from each other, of which few have a score."""
    feeds, side = detections(rng, count, classes), int(np.ceil(np.sqrt(count)))
    corner = np.stack(np.divmod(np.arange(count), side), -1)[None] * 10
    scores = np.zeros(classes * count, np.float32)
    scores[np.linspace(0, scores.size - 1, found).astype(int)] = 0.9
    boxes = np.concatenate([corner, corner + 5], -1).astype(np.float32)
    return feeds | {"boxes": boxes, "scores": scores.reshape(1, classes, count)}


def cases(rng: np.random.Generator) -> dict[str, tuple[str, Feeds]]:
    found = {}
    for name, text, count, classes, limit in (
        ("NMS", NMS, 1000, 1, 100), ("NMS", NMS, 1000, 1, 1000), ("NMS", NMS, 5000, 20, 100),
        ("NMS", NMS, 5000, 20, 5000), ("tail", TAIL, 300, 1, 100), ("tail", TAIL, 5000, 20, 100),
    ):  # fmt: skip
        sizes = {"count": count, "classes": classes, "limit": limit}
        what = f"{name}, {count} boxes x {classes}, at most {limit}"
        found[what] = text % sizes, detections(rng, count, classes)
    for count, classes in ((300, 1), (2000, 20)):
        for rows in (0, 1, 2, 100):
            what = f"tail, {count} boxes x {classes}, {rows} found"
            found[what] = TAIL % {"count": count, "classes": classes, "limit": 100}, few(rng, count, classes, rows)
    sizes = {"x": rng.random(8400).astype(np.float32), "k": np.array([100])}
    found["TopK of a number that is given, at most 300"] = SIZED, sizes
    found["Unique of 10,000, 1,000 different"] = UNIQUE, {"x": rng.integers(0, 1000, 10000)}
    x = np.where(rng.random((1000, 1000)) < 0.1, rng.random((1000, 1000)), 0).astype(np.float32)
    found["NonZero of a million, 10 %"] = NON_ZERO, {"x": x}
    return found | {"masked_select of a million, 5 %": (MASKED, {"x": x})}


def seconds(run: Callable[[], object]) -> float:
    run()
    begin, count = time.perf_counter(), 0
    while count < 5 or time.perf_counter() - begin < 0.15:
        run()
        count += 1
    return (time.perf_counter() - begin) / count


def measure(name: str, model: onnx.ModelProto, feeds: Feeds, turns: int) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    core = Core()
    request = core.compile_model(core.read_model(model), "CPU").create_infer_request()
    found, wanted = request.infer(feeds), session.run(None, feeds)
    for value, array in zip(model.graph.output, wanted, strict=True):
        np.testing.assert_allclose(found[value.name], array, rtol=1e-5)
    pairs = [(seconds(lambda: request.infer(feeds)), seconds(lambda: session.run(None, feeds))) for _ in range(turns)]
    ours, others = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    ratios = sorted(other / own for own, other in pairs)
    middle = statistics.median(ratios)
    print(f"| {name} | {ours:,.0f} | {others:,.0f} | {middle:.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f}) |", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--turns", type=int, default=9)
    arguments.add_argument("--only", default="")
    given = arguments.parse_args()
    print("| network | ours us | ONNX Runtime us | ONNX Runtime over ours |\n| --- | --: | --: | --: |")
    for name, (text, feeds) in cases(np.random.default_rng(0)).items():
        if given.only in name:
            measure(name, parser.parse_model(HEAD + text), feeds, given.turns)


if __name__ == "__main__":
    main()
