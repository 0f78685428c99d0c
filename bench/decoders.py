"""Generating tokens: a decoder whose cache of keys and values grows by a row for each token.

python bench/decoders.py                          6 layers of 256, 512 tokens; against other engines
python bench/decoders.py 12x768 --tokens 512 --rounds 3 --json figures.json

Each way has a process of its own, and they take turns: each generates all tokens, from an empty cache. Past keys and
values are plain inputs, and results are the next token's inputs; ``states`` is a request of ours that keeps them
(docs/stateful.md); ``bound`` is ONNX Runtime with its IOBinding, which leaves results where they are. *Of the
bandwidth*: the bytes of all weights and of half of the cache, once for each token, over the time and over the memory's
bandwidth as measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import engines
import shapes
import tunewright

Arrays = dict[str, Any]
#: layers, width, heads
DECODERS = {"6x256": (6, 256, 8), "12x768": (12, 768, 12)}
#: the engine of each way
WAYS = {
    "tunewright": "tunewright", "states": "tunewright", "onnxruntime": "onnxruntime", "bound": "onnxruntime",
    "openvino": "openvino",
}  # fmt: skip
#: tokens at first that are not counted
FIRST = 8


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        return work(*sys.argv[2:4])
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", default=["6x256"], help=", ".join(DECODERS))
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", type=Path, metavar="FILE")
    given = options.parse_args()
    unknown = [name for name in given.names if name not in DECODERS]
    if unknown:
        options.error(f"there is no {unknown[0]!r}; there are {', '.join(DECODERS)}")
    print(engines.machine())
    report: dict[str, Any] = {}
    for name in given.names:
        report[name] = measured(name, given.tokens, given.rounds)
        if given.json:
            given.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def measured(name: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a token, by way, in the median of all rounds."""
    installed = ("tunewright", *engines.installed())
    workers = {way: shapes.started(__file__, way, name) for way, engine in WAYS.items() if engine in installed}
    times: dict[str, list[float]] = {way: [] for way in workers}
    whole: dict[str, list[float]] = {way: [] for way in workers}
    grown: dict[str, float] = {}
    last: dict[str, np.ndarray[Any, Any]] = {}
    try:
        for number in range(rounds + 1):
            for way, worker in workers.items():
                before = worker.memory().get("resident_mb", 0.0)
                answer = worker.ask(str(tokens if number else min(tokens, 64)))
                if number:  # the first turn warms up
                    times[way] += answer["times"][FIRST:]
                    whole[way].append(sum(answer["times"]))
                    last[way] = np.array(answer["logits"])
                if number == 1:
                    grown[way] = worker.memory().get("resident_mb", 0.0) - before
        bandwidth = workers["tunewright"].ask("bandwidth")["bandwidth"]
    finally:
        for worker in workers.values():
            worker.stop()
    layers, width, _ = DECODERS[name]
    ours, cache = last["tunewright"], 2 * 4 * layers * width * tokens
    off = max(float(np.abs(other - ours).max()) for other in last.values())
    weights = workers["tunewright"].facts["weights"]
    print(f"\ndecoder of {name}, {tokens} tokens (ms a token); logits differ by {off:.1e} at most; a cache of "
          f"{cache / 1e6:.0f} MB; {bandwidth / 1e9:.1f} GB/s")  # fmt: skip
    print(f"{'':12} {'median':>8} {'quartiles':>14} {'all':>8} {'ours over it':>13} {'of the bandwidth':>17} "
          f"{'grew MB':>8}")  # fmt: skip
    found: dict[str, Any] = {"bandwidth": bandwidth, "weights": weights, "cache": cache}
    for way, taken in times.items():
        low, middle, high = statistics.quantiles(taken, n=4)
        over = statistics.median(a / b for a, b in zip(whole[way], whole["tunewright"], strict=True))
        # half of the cache is read in the mean
        share = (weights + cache / 2) * tokens / (statistics.median(whole[way]) / 1e3) / bandwidth
        found[way] = {"median": middle, "whole": whole[way], "over": over, "share": share, "grown": grown[way]}
        print(f"{way:12} {middle:8.3f} {low:6.3f}..{high:6.3f} {statistics.median(whole[way]):8.0f} {over:13.2f} "
              f"{share:17.2f} {grown[way]:8.1f}")  # fmt: skip
    return found


#: answers a token's logits, and goes on from there; of None: begins anew
Step = Callable[[int | None], Any]


def work(way: str, name: str) -> int:
    """In a worker's process: as many tokens as each line says."""
    model = decoder(*DECODERS[name])
    others = {"bound": bound, "states": stateful}
    step = others[way](model, name) if way in others else plain(WAYS[way], model, name)
    print(json.dumps({"weights": sum(array.nbytes for array in read(model))}), flush=True)
    for line in sys.stdin:
        if line.strip() == "bandwidth":
            print(json.dumps({"bandwidth": measured_bandwidth()}), flush=True)
            continue
        times, logits = [], None
        step(None)
        for token in range(int(line)):
            begin = time.perf_counter()
            logits = step(token * 7 % 1000)
            times.append((time.perf_counter() - begin) * 1e3)
        assert logits is not None
        print(json.dumps({"times": times, "logits": np.asarray(logits).reshape(-1).tolist()}), flush=True)
    return 0


def read(model: bytes) -> list[np.ndarray[Any, Any]]:
    """The weights that a token reads as a whole: factors of products."""
    loaded = onnx.load_from_string(model)
    factors = {node.input[1] for node in loaded.graph.node if node.op_type == "MatMul"}
    return [numpy_helper.to_array(t) for t in loaded.graph.initializer if t.name in factors]


def measured_bandwidth() -> float:
    from tunewright.measure.ceilings import ceilings
    from tunewright.plugins.single import open_device

    return ceilings(open_device("CPU")).bandwidth


def states(name: str) -> dict[str, str]:
    """Names of the caches: of inputs, and of the results that continue them."""
    layers, _, _ = DECODERS[name]
    return {f"past_{n}{k}": f"present_{n}{k}" for n in "kv" for k in range(layers)}


def empty(name: str) -> np.ndarray[Any, Any]:
    _, width, heads = DECODERS[name]
    return np.zeros((1, heads, 0, width // heads), np.float32)


def plain(engine: str, model: bytes, name: str) -> Step:
    """Past keys and values as plain inputs."""
    run, _ = shapes.loaded(engine, model)
    state: Arrays = {}

    def step(token: int | None) -> Any:
        if token is None:
            state.update({past: empty(name) for past in states(name)})
            return None
        made = run({"ids": np.array([[token]]), **state})
        state.update({past: made[present] for past, present in states(name).items()})
        return made["logits"]

    return step


def stateful(model: bytes, name: str) -> Step:
    """A request that keeps past keys and values itself."""
    request = tunewright.Core().compile_model(model, "CPU", stateful=states(name)).create_infer_request()

    def step(token: int | None) -> Any:
        if token is None:
            return request.reset_state()
        return request.infer({"ids": np.array([[token]])})["logits"]

    return step


def bound(model: bytes, name: str) -> Step:
    """ONNX Runtime's IOBinding: it makes results, which are bound as the next inputs as they are."""
    import onnxruntime as ort

    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    state: Arrays = {}
    names = [o.name for o in session.get_outputs()]

    def step(token: int | None) -> Any:
        if token is None:
            state.update({past: ort.OrtValue.ortvalue_from_numpy(empty(name)) for past in states(name)})
            return None
        binding = session.io_binding()
        binding.bind_cpu_input("ids", np.array([[token]]))
        for past, value in state.items():
            binding.bind_ortvalue_input(past, value)
        for output in names:
            binding.bind_output(output, "cpu")
        session.run_with_iobinding(binding)
        made = dict(zip(names, binding.get_outputs(), strict=True))
        state.update({past: made[present] for past, present in states(name).items()})
        return made["logits"].numpy()

    return step


def decoder(layers: int, width: int, heads: int, words: int = 1000) -> bytes:
    """As exporters write one: positions and a causal mask out of the lengths, caches grown by Concat."""
    rng, nodes, weights = np.random.default_rng(0), list[onnx.NodeProto](), list[onnx.TensorProto]()

    def const(name: str, array: Any, dtype: Any = np.float32) -> str:
        weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def add(op: str, inputs: list[str], output: str, **attrs: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [output], **attrs))
        return output

    def weight(name: str, *shape: int) -> str:
        return const(name, rng.standard_normal(shape) / np.sqrt(shape[0]))

    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "n"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)]
    each = width // heads
    for name, value in (("zero", 0), ("one", 1), ("two", 2)):
        const(name, value, np.int64)
    const("apart", [0, 0, heads, each], np.int64)
    const("joined", [0, 0, width], np.int64)
    past = add("Gather", [add("Shape", ["past_k0"], "past_shape"), "two"], "past", axis=0)
    new = add("Gather", [add("Shape", ["ids"], "ids_shape"), "one"], "new", axis=0)
    total = add("Add", [past, new], "total")
    rows = add("Range", [past, total, "one"], "rows")
    at = add("Gather", [const("positions", rng.standard_normal((1024, width)) * 0.1), rows], "at")
    x = add("Add", [add("Gather", [const("words", rng.standard_normal((words, width)) * 0.5), "ids"], "word"), at], "x")
    later = add("Greater", [add("Range", ["zero", total, "one"], "columns"),
                            add("Unsqueeze", [rows, const("axis", [1], np.int64)], "row")], "later")  # fmt: skip
    mask = add("Where", [later, const("never", -1e9), const("always", 0.0)], "mask")
    for k in range(layers):
        scale = const(f"g{k}", np.ones(width))
        normal = add("LayerNormalization", [x, scale, const(f"b{k}", np.zeros(width))], f"n{k}")
        parts = {}
        for n in "qkv":
            part = add("MatMul", [normal, weight(f"w{n}{k}", width, width)], f"{n}0{k}")
            part = add("Transpose", [add("Reshape", [part, "apart"], f"{n}1{k}")], f"{n}2{k}", perm=[0, 2, 1, 3])
            if n != "q":
                shape = ["batch", heads, "past", each]
                inputs.append(helper.make_tensor_value_info(f"past_{n}{k}", TensorProto.FLOAT, shape))
                part = add("Concat", [f"past_{n}{k}", part], f"present_{n}{k}", axis=2)
                outputs.append(helper.make_tensor_value_info(part, TensorProto.FLOAT, None))
            parts[n] = part
        turned = add("Transpose", [parts["k"]], f"kt{k}", perm=[0, 1, 3, 2])
        scores = add("Mul", [add("MatMul", [parts["q"], turned], f"s{k}"), const(f"c{k}", each**-0.5)], f"t{k}")
        shares = add("Softmax", [add("Add", [scores, mask], f"m{k}")], f"a{k}", axis=-1)
        mixed = add("Transpose", [add("MatMul", [shares, parts["v"]], f"o{k}")], f"p{k}", perm=[0, 2, 1, 3])
        mixed = add("MatMul", [add("Reshape", [mixed, "joined"], f"r{k}"), weight(f"wo{k}", width, width)], f"u{k}")
        x = add("Add", [x, mixed], f"x{k}")
        scale = const(f"h{k}", np.ones(width))
        normal = add("LayerNormalization", [x, scale, const(f"d{k}", np.zeros(width))], f"l{k}")
        inner = add("Relu", [add("MatMul", [normal, weight(f"e{k}", width, 4 * width)], f"f{k}")], f"relu{k}")
        x = add("Add", [x, add("MatMul", [inner, weight(f"i{k}", 4 * width, width)], f"j{k}")], f"y{k}")
    add("MatMul", [x, weight("head", width, words)], "logits")
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


if __name__ == "__main__":
    sys.exit(main())
