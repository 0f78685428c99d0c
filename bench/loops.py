"""Loops and branches: networks whose time goes by in Loop and If, against ONNX Runtime.

python bench/loops.py                     all networks, in turns
python bench/loops.py tiny greedy --rounds 15 --json figures.json

Engines have a process each and take turns. A turn infers for about 50 ms; figures are medians of turns, and the
quartiles of their ratios. ``in launches`` says how many of the control-flow nodes that are left run inside a launch.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import parser

import engines
import shapes

Arrays = dict[str, Any]
HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'
ENGINES = ("tunewright", "onnxruntime")
#: seconds of a turn
TURN = 0.05


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        return work(*sys.argv[2:4])
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", default=[*NETWORKS], help=", ".join(NETWORKS))
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--json", type=Path, metavar="FILE")
    given = options.parse_args()
    unknown = [name for name in given.names if name not in NETWORKS]
    if unknown:
        options.error(f"there is no {unknown[0]!r}; there are {', '.join(NETWORKS)}")
    print(engines.machine())
    print(f"\n{'':16} {'loops':>6} {'in launches':>12} {'ours, us':>10} {'ONNX Runtime':>13} {'ours over it':>13} "
          f"{'quartiles':>14} {'off by':>8}")  # fmt: skip
    report: dict[str, Any] = {}
    for name in given.names:
        report[name] = measured(name, given.rounds)
        if given.json:
            given.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Microseconds of an inference, of both engines."""
    workers = {engine: shapes.started(__file__, engine, name) for engine in ENGINES}
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    try:
        for number in range(rounds + 1):
            for engine, worker in workers.items():
                answer = worker.ask("turn")
                if number:  # the first turn warms up
                    times[engine].append(answer["microseconds"])
        results = [workers[engine].ask("results")["results"] for engine in ENGINES]
        facts = workers["tunewright"].facts
    finally:
        for worker in workers.values():
            worker.stop()
    ours, theirs = (times[engine] for engine in ENGINES)
    low, ratio, high = statistics.quantiles([b / a for a, b in zip(ours, theirs, strict=True)], n=4)
    off = max(float(np.abs(np.array(a, float) - np.array(b, float)).max(initial=0)) if np.shape(a) == np.shape(b)
              else np.inf for a, b in zip(*results, strict=True))  # fmt: skip
    print(f"{name:16} {facts['loops']:6} {facts['launched']:12} {statistics.median(ours):10.1f} "
          f"{statistics.median(theirs):13.1f} {ratio:13.2f} {low:6.2f}..{high:6.2f} {off:8.1e}")  # fmt: skip
    return {**facts, **times, "ratio": ratio, "quartiles": (low, high), "off": off}


def work(engine: str, name: str) -> int:
    """In a worker's process: a turn, or the results, for each line."""
    make, draw = NETWORKS[name]
    model = make()
    run, compiled = shapes.loaded(engine, model)
    feeds, names = draw(np.random.default_rng(0)), [o.name for o in onnx.load_from_string(model).graph.output]
    results = [run(feeds) for _ in range(3)][-1]
    begin = time.perf_counter()
    run(feeds)
    count = max(1, int(TURN / (time.perf_counter() - begin)))
    print(json.dumps(facts_of(compiled)), flush=True)
    for line in sys.stdin:
        if line.strip() == "results":
            print(json.dumps({"results": [np.asarray(results[name]).tolist() for name in names]}), flush=True)
            continue
        begin = time.perf_counter()
        for _ in range(count):
            run(feeds)
        print(json.dumps({"microseconds": (time.perf_counter() - begin) / count * 1e6}), flush=True)
    return 0


def facts_of(compiled: Any) -> dict[str, Any]:
    """How many control-flow nodes our plans have, and how many of them run inside a launch."""
    plans = [] if compiled is None else compiled.program.plans
    steps = [step for plan in plans for step in plan.steps if step.control is not None]
    return {"loops": len(steps), "launched": sum(step.block is not None for step in steps)}


def parsed(text: str, **arrays: np.ndarray[Any, Any]) -> bytes:
    """A model, with these arrays as weights."""
    model = parser.parse_model(HEAD + text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    """Numbers of a layer's weights."""
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


TINY = """
g (float[5] x, int64 n) => (float[5] y)
{
    t = Constant <value = bool {1}> ()
    y = Loop (n, t, x) <body = b (int64 i, bool go, float[5] s) => (bool on, float[5] z)
    {
        on = Identity(go)
        z = Tanh(s)
    }>
}
"""
LSTM = """
g (float[t,b,40] x, float[b,64] h0, float[b,64] c0) => (float[n,b,64] y, float[b,64] hn)
{
    true = Constant <value = bool {1}> ()
    most = Constant <value = int64 {9223372036854775807}> ()
    zero = Constant <value = int32 {0}> ()
    first = Constant <value = int64 {0}> ()
    shape = Shape(x)
    length = Gather <axis = 0> (shape, first)
    end = Cast <to = 6> (length)
    steps, hn, cn, y = Loop (most, true, zero, h0, c0)
        <body = b (int64 i, bool go, int32 k, float[b,64] h1, float[b,64] c1)
        => (bool on, int32 k2, float[b,64] h2, float[b,64] c2, float[b,64] out)
    {
        one = Constant <value = int32 {1}> ()
        k2 = Add(k, one)
        less = Less(k2, end)
        on = And(less, go)
        xt = Gather <axis = 0> (x, k)
        xh = Concat <axis = 1> (xt, h1)
        s = MatMul(xh, w)
        g = Add(s, bias)
        gi, gj, gf, go2 = Split <axis = 1, num_outputs = 4> (g)
        si = Sigmoid(gi)
        tj = Tanh(gj)
        sf = Sigmoid(gf)
        so = Sigmoid(go2)
        fc = Mul(sf, c1)
        ij = Mul(si, tj)
        c2 = Add(fc, ij)
        tc = Tanh(c2)
        h2 = Mul(so, tc)
        out = Identity(h2)
    }>
}
"""
#: an attention over an encoded sentence, a cell, and a branch in each turn
ATTENDING = """
g (float[s,64] src, float[128] start, int64 most) => (float[n,128] y, float[128] last)
{
    true = Constant <value = bool {1}> ()
    e = MatMul(src, we)
    memory = Tanh(e)
    last, y = Loop (most, true, start) <body = b (int64 i, bool go, float[128] h)
        => (bool on, float[128] h2, float[128] out)
    {
        zero = Constant <value_ints = [0]> ()
        row = Unsqueeze(h, zero)
        q = MatMul(row, wq)
        turned = Transpose <perm = [1, 0]> (memory)
        scores = MatMul(q, turned)
        shares = Softmax <axis = 1> (scores)
        mixed = MatMul(shares, memory)
        o = MatMul(mixed, wo)
        o1 = Squeeze(o, zero)
        m = ReduceMax <keepdims = 0> (o1)
        limit = Constant <value = float {0.5}> ()
        big = Greater(m, limit)
        h2 = If (big) <then_branch = large () => (float[128] c) { c = Tanh(o1) },
            else_branch = small () => (float[128] d) { sum = Add(o1, h) d = Tanh(sum) }>
        on = Identity(go)
        out = Identity(h2)
    }>
}
"""
#: all tokens are read again in each turn
GREEDY = """
g (int64[1,p] ids, int64 most) => (int64[1,m] y)
{
    true = Constant <value = bool {1}> ()
    y = Loop (most, true, ids) <body = b (int64 i, bool go, int64[1,a] s) => (bool on, int64[1,c] z)
    {
        e = Gather <axis = 0> (words, s)
        q = MatMul(e, wq)
        turned = Transpose <perm = [0, 2, 1]> (e)
        scores = MatMul(q, turned)
        shares = Softmax <axis = 2> (scores)
        mixed = MatMul(shares, e)
        from = Constant <value_ints = [-1]> ()
        to = Constant <value_ints = [9223372036854775807]> ()
        axis = Constant <value_ints = [1]> ()
        last = Slice(mixed, from, to, axis)
        logits = MatMul(last, wo)
        best = ArgMax <axis = 2, keepdims = 0> (logits)
        z = Concat <axis = 1> (s, best)
        on = Identity(go)
    }>
}
"""
#: keys and values grow, and a token ends it
CACHED = """
g (int64[1,1] first, float[1,0,64] nothing, int64 most) => (int64[1,m] y, float[1,q,64] keys)
{
    true = Constant <value = bool {1}> ()
    last, keys, values, y = Loop (most, true, first, nothing, nothing)
        <body = b (int64 i, bool go, int64[1,1] token, float[1,a,64] k1, float[1,a,64] v1)
        => (bool on, int64[1,1] token2, float[1,c,64] k2, float[1,c,64] v2, int64[1,1] out)
    {
        e = Gather <axis = 0> (words, token)
        q = MatMul(e, wq)
        k = MatMul(e, wk)
        v = MatMul(e, wv)
        k2 = Concat <axis = 1> (k1, k)
        v2 = Concat <axis = 1> (v1, v)
        turned = Transpose <perm = [0, 2, 1]> (k2)
        scores = MatMul(q, turned)
        shares = Softmax <axis = 2> (scores)
        mixed = MatMul(shares, v2)
        logits = MatMul(mixed, wo)
        token2 = ArgMax <axis = 2, keepdims = 0> (logits)
        out = Identity(token2)
        end = Constant <value_ints = [999]> ()
        same = Equal(token2, end)
        flat = Constant <value_ints = [0, 1]> ()
        ended = Squeeze(same, flat)
        on = Not(ended)
    }>
}
"""
ROWS = """
g (float[k,4] x, int64 n) => (float[m,4] y)
{
    t = Constant <value = bool {1}> ()
    y = Loop (n, t, x) <body = b (int64 i, bool go, float[a,4] s) => (bool on, float[c,4] z)
    {
        on = Identity(go)
        axes = Constant <value_ints = [0]> ()
        q = ReduceMean <keepdims = 1> (s, axes)
        r = Tanh(q)
        z = Concat <axis = 0> (s, r)
    }>
}
"""


def tiny() -> bytes:
    return parsed(TINY)


def lstm() -> bytes:
    rng = np.random.default_rng(1)
    return parsed(LSTM, w=floats(rng, 104, 256), bias=floats(rng, 256))


def attending() -> bytes:
    rng = np.random.default_rng(1)
    return parsed(ATTENDING, we=floats(rng, 64, 128), wq=floats(rng, 128, 128), wo=floats(rng, 128, 128))


def greedy() -> bytes:
    rng = np.random.default_rng(1)
    return parsed(GREEDY, words=floats(rng, 500, 64) * 8, wq=floats(rng, 64, 64), wo=floats(rng, 64, 500))


def cached() -> bytes:
    rng = np.random.default_rng(1)
    square = {name: floats(rng, 64, 64) for name in ("wq", "wk", "wv")}
    return parsed(CACHED, words=floats(rng, 1000, 64) * 8, wo=floats(rng, 64, 1000), **square)


def scripted(name: str) -> Callable[[], bytes]:
    """A module whose loop torch.jit.script keeps (bench/loops_scripted.py)."""

    def make() -> bytes:
        import torch

        import loops_scripted

        torch.manual_seed(0)
        module, args, axes = loops_scripted.MODULES[name]
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                torch.jit.script(module().eval()), args, file, input_names=["x", "n"][: len(args)], opset_version=17,
                dynamo=False, dynamic_axes={"x": axes},
            )  # fmt: skip
        return file.getvalue()

    return make


def count(n: int) -> np.ndarray[Any, Any]:
    return np.array(n, np.int64)


NETWORKS: dict[str, tuple[Callable[[], bytes], Callable[[np.random.Generator], Arrays]]] = {
    "tiny": (tiny, lambda rng: {"x": floats(rng, 5), "n": count(1000)}),
    "lstm": (lstm, lambda rng: {"x": floats(rng, 50, 1, 40), "h0": floats(rng, 1, 64), "c0": floats(rng, 1, 64)}),
    "scripted lstm": (scripted("Stacked"), lambda rng: {"x": floats(rng, 50, 1, 40)}),
    "scripted greedy": (scripted("Greedy"), lambda rng: {"x": floats(rng, 1, 64)}),
    "scripted tokens": (
        scripted("Tokens"), lambda rng: {"x": rng.integers(0, 200, (1, 4)), "n": count(20)}),
    "scripted keys": (scripted("Keys"), lambda rng: {"x": rng.integers(0, 200, (1, 1)), "n": count(40)}),
    "attending": (
        attending, lambda rng: {"src": floats(rng, 30, 64), "start": floats(rng, 128), "most": count(30)}),
    "rows": (lambda: parsed(ROWS), lambda rng: {"x": floats(rng, 4, 4), "n": count(100)}),
    "greedy": (greedy, lambda rng: {"ids": rng.integers(0, 500, (1, 4)), "most": count(20)}),
    "greedy long": (greedy, lambda rng: {"ids": rng.integers(0, 500, (1, 1)), "most": count(100)}),
    "cached": (
        cached, lambda rng: {"first": count(7).reshape(1, 1), "nothing": np.zeros((1, 0, 64), np.float32),
                             "most": count(40)}),
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
