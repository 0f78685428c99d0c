"""Decoders whose cache grows, and sizes that were never seen, on an NVIDIA GPU.

python bench/gpu_decoders.py                          everything; against torch
python bench/gpu_decoders.py --tokens 128 --decoders 6x256 --no-peers --json figures.json
python bench/gpu_decoders.py --interpreted            the same program on the processor, tiny: says only that it runs

Tokens: a decoder begins with nothing and makes one token after the other; ms of each token, logits on the host.
``states``: a request keeps the cache (docs/stateful.md). ``plain``: past and present are inputs and outputs, through
the host. ``per shape``: SHAPE_TEMPLATES = NO, a plan for each length, for a few tokens alone. ``eager``: torch, with a
cache that torch.cat grows. ``compiled``: torch.compile (reduce-overhead) over a static cache. ``graphed``: the same in
a CUDA graph that is recorded by hand, since torch records none where inputs are written to. Sizes: the first inference
at each size, and the median of later ones.

Behind each way: ms that the GPU takes for the last graph (events around 50 replays, one behind the other), and the
number of its parts. ``--kernels`` adds the kernels that one replay runs, by torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

if "--interpreted" in sys.argv:  # Triton decides when it is imported
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
import tunewright
from tunewright.devices.cuda.graph import BoundGraph

Arrays = dict[str, Any]
Step = Callable[[int], Any]
DECODERS = {"6x256": (6, 256, 8), "12x768": (12, 768, 12)}
WORDS, POSITIONS = 1000, 1024
#: tokens and sizes at first that are not counted: plans, kernels and graphs are made
FIRST = 8
#: tokens that a plan for each length is measured for
FEW = 10


class Counted:
    """How many graphs were recorded, the last one, and what must live as long as the program."""

    recorded = 0
    last: BoundGraph | None = None
    repaired: Any = None


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--decoders", nargs="*", default=[*DECODERS])
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--sizes", type=int, default=30)
    options.add_argument("--no-peers", action="store_true")
    options.add_argument("--no-sizes", action="store_true")
    options.add_argument("--kernels", action="store_true")
    options.add_argument("--interpreted", action="store_true")
    options.add_argument("--json", type=Path, metavar="FILE")
    given = options.parse_args()
    count_graphs()
    core, device = opened(given.interpreted)
    if given.interpreted:
        DECODERS["tiny"], given.decoders, given.tokens, given.sizes = (1, 32, 2), ["tiny"], FIRST + 4, 4
    report: dict[str, Any] = {"machine": machine(given.interpreted)}
    print(report["machine"])
    for name in given.decoders:
        report[name] = decoders(core, device, name, given)
    if not given.no_sizes:
        report["sizes"] = new_sizes(core, device, given)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def machine(interpreted: bool) -> str:
    import torch
    import triton

    name = "Triton's interpreter" if interpreted else torch.cuda.get_device_name(0)
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}, tunewright {tunewright.__version__}"


def opened(interpreted: bool) -> tuple[Any, str]:
    """A core with knowledge of nothing, and the device's name."""
    folder = tempfile.mkdtemp()
    if interpreted:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
        from conformance import interpreter
        from tunewright.devices.cuda.device import CudaDevice
        from tunewright.plugins import single

        Counted.repaired = interpreter.repaired()
        Counted.repaired.__enter__()
        device, found = CudaDevice("GPU.0", raw="cpu"), {"GPU.0": CudaDevice}
        single.available, single.serving, single._opened = lambda: (found, {}), found.get, lambda key: device
    return tunewright.Core({"USER_DB_PATH": f"{folder}/kb", "CACHE_DIR": f"{folder}/kernels"}), "GPU.0"


def count_graphs() -> None:
    real = BoundGraph.prepare

    def counted(self: BoundGraph) -> None:
        if self._replay is None:
            Counted.recorded, Counted.last = Counted.recorded + 1, self
        real(self)

    BoundGraph.prepare = counted  # type: ignore[method-assign]


def on_gpu(replay: Callable[[], object], stream: Any) -> float:
    """ms that the GPU takes for a graph."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        replay()
        begin.record()
        for _ in range(50):
            replay()
        end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 50


def replayed(kernels: bool) -> Arrays:
    """What the GPU does for the last graph that was recorded; nothing where there is none."""
    last, Counted.last = Counted.last, None
    if last is None or last._replay is None or last._queue.stream is None:
        return {}
    found: Arrays = {"gpu": on_gpu(last._replay, last._queue.stream), "parts": len(last._parts)}
    if kernels:
        found["kernels"] = profiled(last._replay)
    return found


def profiled(replay: Callable[[], object]) -> list[tuple[str, int, float]]:
    """The kernels of a graph: name, how many, and us of all of them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        replay()
        torch.cuda.synchronize()
    rows = [(row.key, row.count, row.self_device_time_total) for row in watched.key_averages()]
    return sorted([row for row in rows if row[2]], key=lambda row: -row[2])


def told(row: Arrays) -> str:
    """The GPU's share of a way, in words."""
    if "gpu" not in row:
        return ""
    lines = [f"; GPU {row['gpu']:.3f} ms, {row['parts']} parts"]
    for name, count, took in row.get("kernels", [])[:16]:
        lines.append(f"    {took:8.1f} us {count:4} x {name[:90]}")
    return "\n".join(lines)


# ---- tokens ------------------------------------------------------------------------------------------------------


def decoders(core: Any, device: str, name: str, given: argparse.Namespace) -> Arrays:
    found: Arrays = {}
    for half in (False, True):
        kind = f"{name} {'fp16' if half else 'fp32'}"
        model = decoder(*DECODERS[name], half)
        config = {"INFERENCE_PRECISION_HINT": "f16" if half else "f32"}
        ways: dict[str, Callable[[], Step]] = {
            "states": lambda c=config, m=model: stateful(core, device, m, c),
            "plain": lambda c=config, m=model: plain(core, device, m, c),
            "per shape": lambda c=config, m=model: plain(core, device, m, {**c, "SHAPE_TEMPLATES": "NO"}),
        }
        if not given.no_peers and not given.interpreted:
            import gpu_decoders_torch

            weights = {one.name: numpy_helper.to_array(one) for one in onnx.load_from_string(model).graph.initializer}
            ways["eager"] = lambda w=weights: gpu_decoders_torch.eager(w, *DECODERS[name])
            ways["compiled"] = lambda w=weights: gpu_decoders_torch.compiled(w, *DECODERS[name], POSITIONS)
            ways["graphed"] = lambda w=weights: gpu_decoders_torch.Graphed(w, *DECODERS[name], POSITIONS)
        first: list[int] = []
        for way, make in ways.items():
            tokens = min(given.tokens, FEW) if way == "per shape" else given.tokens
            Counted.last = None
            try:
                step = make()
                found[f"{kind} {way}"] = row = measured(step, tokens, first)
                row |= replayed(given.kernels)
                if hasattr(step, "replay"):  # a peer's
                    row |= {"gpu": on_gpu(step.replay, step.stream), "parts": 1}
                del step
            except Exception as error:  # a way that fails says so, and the others go on
                print(f"{kind:14} {way:10} failed: {type(error).__name__}: {str(error)[:300]}")
                continue
            print(f"{kind:14} {way:10} {row['median']:8.3f} ms a token "
                  f"(mean {row['mean']:.3f}, 90% {row['ninety']:.3f}, longest {row['longest']:.1f}, "
                  f"first {row['first']:.0f}); {row['recorded']} graphs; {row['same']}" + told(row),
                  flush=True)  # fmt: skip
    return found


def measured(step: Step, tokens: int, expected: list[int]) -> Arrays:
    """Greedy tokens from a fixed beginning."""
    token, took, made, before = 7, list[float](), list[int](), Counted.recorded
    for _ in range(tokens):
        begin = time.perf_counter()
        logits = step(token)
        token = int(np.asarray(logits)[0, -1].argmax())
        took.append((time.perf_counter() - begin) * 1e3)
        made.append(token)
    if not expected:
        expected += made
    both = min(len(made), len(expected))
    alike = next((n for n in range(both) if made[n] != expected[n]), both)
    rest = sorted(took[min(FIRST, len(took) - 1) :])
    return {
        "median": statistics.median(rest), "mean": statistics.mean(rest), "ninety": rest[int(len(rest) * 0.9)],
        "longest": rest[-1], "first": sum(took[:FIRST]), "recorded": Counted.recorded - before,
        "same": f"{alike} of {len(made)} tokens as the first way", "all": [round(t, 3) for t in took],
    }  # fmt: skip


def stateful(core: Any, device: str, model: bytes, config: dict[str, str]) -> Step:
    request = core.compile_model(model, device, config, stateful="auto").create_infer_request()
    return lambda token: request.infer({"ids": np.array([[token]], np.int64)})["logits"]


def plain(core: Any, device: str, model: bytes, config: dict[str, str]) -> Step:
    compiled = core.compile_model(model, device, config)
    request = compiled.create_infer_request()
    state = {}
    for name, type in compiled.inputs.items():
        if name.startswith("past"):
            _, heads, _, each = type.shape
            state[name] = np.zeros((1, heads, 0, each), type.dtype.numpy)

    def step(token: int) -> Any:
        results = request.infer({"ids": np.array([[token]], np.int64), **state})
        state.update({name: results[name.replace("past", "present")] for name in state})
        return results["logits"]

    return step


def decoder(layers: int, width: int, heads: int, half: bool) -> bytes:
    """As exporters write one: positions and a causal mask out of the lengths, caches grown by Concat."""
    net = Network(half)
    rng, add, const, weight = net.rng, net.add, net.const, net.weight
    net.input("ids", TensorProto.INT64, ["batch", "n"])
    for name, value in (("zero", 0), ("one", 1), ("two", 2)):
        const(name, value, np.int64)
    each = width // heads
    const("apart", [0, 0, heads, each], np.int64)
    const("joined", [0, 0, width], np.int64)
    net.input("past_k0", net.float, ["batch", heads, "past", each])
    past = add("Gather", [add("Shape", ["past_k0"], "past_shape"), "two"], "past", axis=0)
    new = add("Gather", [add("Shape", ["ids"], "ids_shape"), "one"], "new", axis=0)
    total = add("Add", [past, new], "total")
    rows = add("Range", [past, total, "one"], "rows")
    at = add("Gather", [const("positions", rng.standard_normal((POSITIONS, width)) * 0.1), rows], "at")
    words = const("words", rng.standard_normal((WORDS, width)) * 0.5)
    x = add("Add", [add("Gather", [words, "ids"], "word"), at], "x")
    row = add("Unsqueeze", [rows, const("axis", [1], np.int64)], "row")
    later = add("Greater", [add("Range", ["zero", total, "one"], "columns"), row], "later")
    mask = add("Where", [later, const("never", -6e4), const("always", 0.0)], "mask")
    for k in range(layers):
        normal = net.normal(x, f"g{k}", width)
        parts = {}
        for n in "qkv":
            part = add("MatMul", [normal, weight(f"w{n}{k}", width, width)], f"{n}0{k}")
            part = add("Transpose", [add("Reshape", [part, "apart"], f"{n}1{k}")], f"{n}2{k}", perm=[0, 2, 1, 3])
            if n != "q":
                if (n, k) != ("k", 0):
                    net.input(f"past_{n}{k}", net.float, ["batch", heads, "past", each])
                part = add("Concat", [f"past_{n}{k}", part], f"present_{n}{k}", axis=2)
                net.output(part, net.float)
            parts[n] = part
        turned = add("Transpose", [parts["k"]], f"kt{k}", perm=[0, 1, 3, 2])
        scores = add("Mul", [add("MatMul", [parts["q"], turned], f"s{k}"), const(f"c{k}", each**-0.5)], f"t{k}")
        shares = add("Softmax", [add("Add", [scores, mask], f"m{k}")], f"a{k}", axis=-1)
        mixed = add("Transpose", [add("MatMul", [shares, parts["v"]], f"o{k}")], f"p{k}", perm=[0, 2, 1, 3])
        mixed = add("MatMul", [add("Reshape", [mixed, "joined"], f"r{k}"), weight(f"wo{k}", width, width)], f"u{k}")
        x = add("Add", [x, mixed], f"x{k}")
        normal = net.normal(x, f"h{k}", width)
        inner = add("Relu", [add("MatMul", [normal, weight(f"e{k}", width, 4 * width)], f"f{k}")], f"relu{k}")
        x = add("Add", [x, add("MatMul", [inner, weight(f"i{k}", 4 * width, width)], f"j{k}")], f"y{k}")
    net.output(add("MatMul", [x, weight("head", width, WORDS)], "logits"), net.float)
    return net.model()


# ---- sizes -------------------------------------------------------------------------------------------------------


def new_sizes(core: Any, device: str, given: argparse.Namespace) -> Arrays:
    tiny, found = given.interpreted, {}
    rng = np.random.default_rng(1)
    lengths = rng.permutation(np.arange(9, 400))[: FIRST // 2 + given.sizes].tolist()
    widths = (rng.permutation(np.arange(12, 120))[: FIRST // 2 + given.sizes * 2 // 3] * 8).tolist()
    if tiny:
        lengths, widths = [n % 40 + 5 for n in lengths], [w % 64 // 8 * 8 + 32 for w in widths]
    cases: dict[str, tuple[bytes, Callable[[int], Arrays], list[int]]] = {
        "encoder": (encoder(*((1, 32, 2) if tiny else (12, 768, 12))), lambda n: {"ids": words(n)}, lengths),
        "recogniser": (recogniser(8 if tiny else 32), lambda w: {"x": picture(w)}, widths),
    }
    for name, (model, feed, sizes) in cases.items():
        for kind, config in (("classes", {}), ("per shape", {"SHAPE_TEMPLATES": "NO"})):
            some = sizes if kind == "classes" else sizes[: FIRST // 2 + 4]
            Counted.last = None
            try:
                found[f"{name} {kind}"] = row = sizes_of(core, device, model, feed, some, config)
                row |= replayed(given.kernels)
            except Exception as error:
                print(f"{name:10} {kind:9} failed: {type(error).__name__}: {str(error)[:300]}")
                continue
            print(f"{name:10} {kind:9} first {row['first']:8.2f} ms (worst {row['worst']:.1f}), "
                  f"second {row['second']:.2f}, later {row['later']:.3f} ms; "
                  f"{len(some)} sizes, {row['plans']} plans, {row['recorded']} graphs" + told(row),
                  flush=True)  # fmt: skip
    return found


def sizes_of(
    core: Any, device: str, model: bytes, feed: Callable[[int], Arrays], sizes: Iterable[int], config: dict[str, str]
) -> Arrays:  # fmt: skip
    before = Counted.recorded
    compiled = core.compile_model(model, device, config)
    request = compiled.create_infer_request()
    took: list[list[float]] = []
    for size in sizes:
        inputs, times = feed(size), list[float]()
        for _ in range(7):
            begin = time.perf_counter()
            request.infer(inputs)
            times.append((time.perf_counter() - begin) * 1e3)
        took.append([times[0], times[1], statistics.median(times[2:])])
    counted = took[FIRST // 2 :] or took
    return {
        "first": statistics.median(t[0] for t in counted), "worst": max(t[0] for t in counted),
        "second": statistics.median(t[1] for t in counted), "later": statistics.median(t[2] for t in counted),
        "plans": len(compiled.program.plans), "recorded": Counted.recorded - before, "all": took,
    }  # fmt: skip


def words(count: int) -> Any:
    return np.random.default_rng(count).integers(0, WORDS, (1, count))


def picture(width: int) -> Any:
    return np.random.default_rng(width).standard_normal((1, 3, 48, width)).astype(np.float32)


def encoder(layers: int, width: int, heads: int) -> bytes:
    """BERT's kind, without a mask."""
    net = Network(False)
    add, const, weight, each = net.add, net.const, net.weight, width // heads
    net.input("ids", TensorProto.INT64, [1, "n"])
    const("apart", [0, 0, heads, each], np.int64)
    const("joined", [0, 0, width], np.int64)
    const("first", [0], np.int64)
    const("one", [1], np.int64)
    count = add("Slice", [add("Shape", ["ids"], "shape"), "one", const("two", [2], np.int64)], "count")
    at = add("Slice", [const("positions", net.rng.standard_normal((512, width)) * 0.1), "first", count, "first"], "at")
    table = const("words", net.rng.standard_normal((WORDS, width)) * 0.5)
    x = net.normal(add("Add", [add("Gather", [table, "ids"], "word"), at], "sum"), "ge", width)
    for k in range(layers):
        parts = {}
        for n in "qkv":
            part = add("Add", [add("MatMul", [x, weight(f"w{n}{k}", width, width)], f"{n}m{k}"),
                               const(f"b{n}{k}", np.zeros(width))], f"{n}0{k}")  # fmt: skip
            turn = [0, 2, 3, 1] if n == "k" else [0, 2, 1, 3]
            parts[n] = add("Transpose", [add("Reshape", [part, "apart"], f"{n}1{k}")], f"{n}2{k}", perm=turn)
        scores = add("Mul", [add("MatMul", [parts["q"], parts["k"]], f"s{k}"), const(f"c{k}", each**-0.5)], f"t{k}")
        mixed = add("MatMul", [add("Softmax", [scores], f"a{k}", axis=-1), parts["v"]], f"o{k}")
        mixed = add("Reshape", [add("Transpose", [mixed], f"p{k}", perm=[0, 2, 1, 3]), "joined"], f"r{k}")
        mixed = add("Add", [add("MatMul", [mixed, weight(f"wo{k}", width, width)], f"u{k}"),
                            const(f"bo{k}", np.zeros(width))], f"mixed{k}")  # fmt: skip
        x = net.normal(add("Add", [x, mixed], f"x{k}"), f"g{k}", width)
        inner = add("Add", [add("MatMul", [x, weight(f"e{k}", width, 4 * width)], f"f{k}"),
                            const(f"be{k}", np.zeros(4 * width))], f"i{k}")  # fmt: skip
        half = add("Mul", [inner, const(f"half{k}", 0.5)], f"ha{k}")
        bent = add("Erf", [add("Mul", [inner, const(f"root{k}", 0.5**0.5)], f"ro{k}")], f"er{k}")
        inner = add("Mul", [half, add("Add", [bent, const(f"unit{k}", 1.0)], f"on{k}")], f"gelu{k}")
        outer = add("Add", [add("MatMul", [inner, weight(f"d{k}", 4 * width, width)], f"j{k}"),
                            const(f"bd{k}", np.zeros(width))], f"outer{k}")  # fmt: skip
        x = net.normal(add("Add", [x, outer], f"y{k}"), f"h{k}", width)
    net.output(x, net.float)
    return net.model()


def recogniser(channels: int) -> bytes:
    """Lines of text in pictures: convolutions, some of them depthwise, over an open width; then letters."""
    net = Network(False)
    add = net.add
    net.input("x", TensorProto.FLOAT, [1, 3, 48, "width"])
    x, wide = net.conv("x", 3, channels, 3, stride=(2, 2)), channels
    for k, (stride, grow) in enumerate((((1, 1), 2), ((2, 2), 1), ((2, 1), 2), ((1, 1), 1), ((2, 1), 1))):
        deep = net.conv(x, wide, wide, 3, stride=stride, group=wide)
        more = net.conv(deep, wide, wide * grow, 1)
        wide *= grow
        x = add("Add", [deep, more], f"res{k}") if grow == 1 else more
    x = add("ReduceMean", [x], "mean", axes=[2], keepdims=0)
    x = add("Transpose", [x], "turned", perm=[0, 2, 1])
    x = add("MatMul", [x, net.weight("head", wide, 97)], "scores")
    net.output(add("Softmax", [x], "y", axis=-1), net.float)
    return net.model()


class Network:
    """Makes a model."""

    def __init__(self, half: bool) -> None:
        self.rng, self.float = np.random.default_rng(0), TensorProto.FLOAT16 if half else TensorProto.FLOAT
        self._dtype = np.float16 if half else np.float32
        self._nodes, self._weights = list[Any](), list[Any]()
        self._inputs, self._outputs = list[Any](), list[Any]()
        self._made = set[str]()

    def input(self, name: str, type: int, shape: list[Any]) -> None:
        self._inputs.append(helper.make_tensor_value_info(name, type, shape))

    def output(self, name: str, type: int) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, type, None))

    def const(self, name: str, array: Any, dtype: Any = None) -> str:
        self._weights.append(numpy_helper.from_array(np.asarray(array, dtype or self._dtype), name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        return self.const(name, self.rng.standard_normal(shape) / np.sqrt(shape[0]))

    def add(self, op: str, inputs: list[str], output: str, **attrs: Any) -> str:
        assert output not in self._made, output
        self._made.add(output)
        self._nodes.append(helper.make_node(op, inputs, [output], **attrs))
        return output

    def normal(self, x: str, name: str, width: int) -> str:
        scale, bias = self.const(f"{name}s", np.ones(width)), self.const(f"{name}b", np.zeros(width))
        return self.add("LayerNormalization", [x, scale, bias], f"{name}n")

    def conv(self, x: str, ins: int, outs: int, taps: int, stride: tuple[int, int] = (1, 1), group: int = 1) -> str:
        at = len(self._nodes)
        shape = outs, ins // group, taps, taps
        weights = self.const(f"cw{at}", self.rng.standard_normal(shape) * (2 / np.prod(shape[1:])) ** 0.5)
        made = self.add("Conv", [x, weights, self.const(f"cb{at}", np.zeros(outs))], f"conv{at}",
                        pads=[taps // 2] * 4, strides=stride, group=group)  # fmt: skip
        return self.add("HardSwish", [made], f"bent{at}")

    def model(self) -> bytes:
        graph = helper.make_graph(self._nodes, "network", self._inputs, self._outputs, self._weights)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return bytes(made.SerializeToString())


if __name__ == "__main__":
    sys.exit(main())
