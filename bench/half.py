"""Networks in half precision beside their f32 twins and the peers: time of an inference, loading and memory.

    python bench/half.py make --folder zoo
    python bench/half.py time --folder zoo --only resnet,gpt
    python bench/half.py load --folder zoo

`make` needs torch and onnxscript. Every network is exported once in f32; its twins hold the same weights in fp16 and
bf16, with inputs and results in that type, as `.half()` and onnxconverter write them. `time` runs all engines of a
network in one process, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

Arrays = dict[str, np.ndarray[Any, Any]]
KINDS = {"fp32": None, "fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
NUMPY = {TensorProto.FLOAT16: np.dtype(np.float16), TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16)}
#: inputs that operators take in single precision alone
SINGLE = {"Resize": (1, 2), "Upsample": (1,), "QuantizeLinear": (1,)}


# -- networks ---------------------------------------------------------------------------------------------------------
def networks() -> dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]]:
    """A module and its example inputs, by name."""
    import torch
    from torch import nn

    def conv(i: int, o: int, k: int = 3, s: int = 1, g: int = 1) -> Any:
        return nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, groups=g, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    class Residual(nn.Module):
        def __init__(self, i: int, mid: int, o: int, s: int) -> None:
            super().__init__()
            layers = (
                [conv(i, mid, 3, s), nn.Conv2d(mid, o, 3, 1, 1)]
                if mid == o
                else [conv(i, mid, 1), conv(mid, mid, 3, s), nn.Conv2d(mid, o, 1)]
            )
            self.body = nn.Sequential(*layers)
            self.skip = nn.Identity() if (i, s) == (o, 1) else nn.Conv2d(i, o, 1, s)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.body(x) + self.skip(x))

    def resnet(blocks: tuple[int, ...], wide: int) -> Any:
        layers, i = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
        for stage, count in enumerate(blocks):
            for b in range(count):
                mid = 64 << stage
                layers.append(Residual(i, mid, mid * wide, 2 if stage and not b else 1))
                i = mid * wide
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 1000))

    class Inverted(nn.Module):
        def __init__(self, i: int, o: int, s: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(i, i * 6, 1),
                nn.Hardswish(),
                nn.Conv2d(i * 6, i * 6, 3, s, 1, groups=i * 6),
                nn.Hardswish(),
                nn.Conv2d(i * 6, o, 1),
            )
            self.same = (i, s) == (o, 1)

        def forward(self, x: Any) -> Any:
            return x + self.body(x) if self.same else self.body(x)

    def mobilenet() -> Any:
        layers, i = [conv(3, 16, 3, 2)], 16
        for o, s in ((24, 2), (24, 1), (40, 2), (40, 1), (80, 2), (80, 1), (80, 1), (112, 1), (160, 2), (160, 1)):
            layers.append(Inverted(i, o, s))
            i = o
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, 1000))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = (3, 32, 64, 128, 256)
            self.down = nn.ModuleList(nn.Sequential(conv(a, b), conv(b, b)) for a, b in itertools.pairwise(sizes))
            self.up = nn.ModuleList(nn.ConvTranspose2d(b, b // 2, 2, 2) for b in (256, 128, 64))
            self.join = nn.ModuleList(nn.Sequential(conv(b, b // 2), conv(b // 2, b // 2)) for b in (256, 128, 64))
            self.last = nn.Conv2d(32, 4, 1)

        def forward(self, x: Any) -> Any:
            kept = []
            for level in self.down:
                x = level(x if not kept else torch.max_pool2d(x, 2))
                kept.append(x)
            kept.pop()
            for up, join in zip(self.up, self.join, strict=True):
                x = join(torch.cat([up(x), kept.pop()], 1))
            return self.last(x)

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = (3, 32, 64, 128, 256)
            self.down = nn.ModuleList(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.SiLU(), nn.Conv2d(b, b, 3, 1, 1), nn.SiLU())
                for a, b in itertools.pairwise(sizes)
            )
            self.merge = nn.ModuleList((nn.Conv2d(384, 128, 1), nn.Conv2d(192, 64, 3, 1, 1)))
            self.heads = nn.ModuleList(nn.Conv2d(c, 85, 1) for c in (64, 128, 256))

        def forward(self, x: Any) -> Any:
            found = []
            for level in self.down:
                x = level(x)
                found.append(x)
            _, c3, c4, c5 = found

            def up(v: Any) -> Any:
                return nn.functional.interpolate(v, scale_factor=2.0, mode="nearest")

            p4 = nn.functional.silu(self.merge[0](torch.cat([up(c5), c4], 1)))
            p3 = nn.functional.silu(self.merge[1](torch.cat([up(p4), c3], 1)))
            return torch.cat([h(p).flatten(2) for h, p in zip(self.heads, (p3, p4, c5), strict=True)], 2).sigmoid()

    class Block(nn.Module):
        def __init__(self, size: int, heads: int, causal: bool) -> None:
            super().__init__()
            self.heads, self.causal = heads, causal
            self.one, self.two = nn.LayerNorm(size), nn.LayerNorm(size)
            self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
            self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

        def forward(self, x: Any, past: Any = None) -> Any:
            b, n, size = x.shape
            q, k, v = self.qkv(self.one(x)).view(b, n, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            scores = q @ k.transpose(-1, -2) * (size // self.heads) ** -0.5
            if self.causal and past is None:
                scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -1e4)
            made = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, size)
            x = x + self.out(made)
            return x + self.mlp(self.two(x)), torch.stack([k, v])

    class Transformer(nn.Module):
        def __init__(self, size: int, heads: int, depth: int, words: int, causal: bool) -> None:
            super().__init__()
            self.embed = nn.Embedding(words, size)
            self.blocks = nn.ModuleList(Block(size, heads, causal) for _ in range(depth))
            self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, words if causal else 2, bias=False)

        def forward(self, tokens: Any, *past: Any) -> Any:
            x, kept = self.embed(tokens), []
            for i, block in enumerate(self.blocks):
                x, state = block(x, past[i] if past else None)
                kept.append(state)
            return (self.head(self.norm(x)), *(kept if past else ()))

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(80, 256, 2, batch_first=True, bidirectional=True)
            self.last = nn.Linear(512, 40)

        def forward(self, x: Any) -> Any:
            return self.last(self.lstm(x)[0])

    def audio() -> Any:
        layers: list[Any] = [nn.Conv1d(1, 64, 16, 4), nn.GELU()]
        for d in (1, 2, 4, 8, 1, 2):
            layers += [nn.Conv1d(64, 64, 5, padding=2 * d, dilation=d), nn.GELU(), nn.Conv1d(64, 64, 1), nn.GELU()]
        return nn.Sequential(*layers, nn.ConvTranspose1d(64, 1, 16, 4))

    def tokens(n: int) -> Any:
        return torch.randint(0, 1000, (1, n))

    return {
        "resnet18": lambda: (resnet((2, 2, 2, 2), 1), (torch.randn(1, 3, 224, 224),)),
        "resnet50": lambda: (resnet((3, 4, 6, 3), 4), (torch.randn(1, 3, 224, 224),)),
        "mobilenet": lambda: (mobilenet(), (torch.randn(1, 3, 224, 224),)),
        "unet": lambda: (UNet(), (torch.randn(1, 3, 256, 256),)),
        "detector": lambda: (Detector(), (torch.randn(1, 3, 320, 320),)),
        "bert": lambda: (Transformer(384, 6, 6, 8000, False), (tokens(128),)),
        "gpt": lambda: (Transformer(384, 6, 6, 8000, True), (tokens(64),)),
        "gpt-token": lambda: (
            Transformer(512, 8, 6, 8000, True), (tokens(1), *(torch.randn(2, 1, 8, 255, 64) for _ in range(6)))
        ),
        "lstm": lambda: (Recurrent(), (torch.randn(1, 200, 80),)),
        "audio": lambda: (audio(), (torch.randn(1, 1, 16000),)),
    }  # fmt: skip


def make(folder: Path, names: list[str]) -> None:
    """Exports the networks, and writes their twins."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    for name, made in networks().items():
        if names and name not in names:
            continue
        torch.manual_seed(0)
        module, inputs = made()
        path = folder / f"{name}-fp32.onnx"
        torch.onnx.export(module.eval(), inputs, path, dynamo=False, opset_version=17)
        for kind, code in KINDS.items():
            if code is not None:
                onnx.save(twin(onnx.load(path), code), folder / f"{name}-{kind}.onnx")


def twin(model: onnx.ModelProto, code: int) -> onnx.ModelProto:
    """The same network with all its floats in another type, but for what says what to do."""
    graph, dtype = model.graph, NUMPY[code]
    kept = {n.input[i] for n in graph.node for i in SINGLE.get(n.op_type, ()) if i < len(n.input)}

    def change(tensor: onnx.TensorProto) -> None:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in kept:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))

    for weight in graph.initializer:
        change(weight)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = code
            if attribute.HasField("t") and node.output[0] not in kept:
                attribute.t.name = ""
                change(attribute.t)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = code
    del graph.value_info[:]
    return model


# -- engines ----------------------------------------------------------------------------------------------------------
def feeds(path: Path) -> Arrays:
    rng, found = np.random.default_rng(0), {}
    for value in onnx.load(path, load_external_data=False).graph.input:
        kind, dims = value.type.tensor_type.elem_type, [d.dim_value for d in value.type.tensor_type.shape.dim]
        if kind == TensorProto.INT64:
            found[value.name] = rng.integers(0, 1000, dims)
        else:
            found[value.name] = rng.standard_normal(dims).astype(NUMPY.get(kind, np.dtype(np.float32)))
    return found


def ours(path: Path) -> Callable[[Arrays], Any]:
    from tunewright import Core

    return Core().compile_model(path, "CPU")


def ort(path: Path) -> Callable[[Arrays], Any]:
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda given: session.run(None, given)


def openvino(path: Path) -> Callable[[Arrays], Any]:
    import openvino

    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(path, "CPU", hints).create_infer_request()
    return lambda given: request.infer(list(given.values()))


ENGINES = {"ours": ours, "ort": ort, "openvino": openvino}


def runs(folder: Path, name: str, engines: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Whatever can run: an engine may not know a type."""
    for kind in KINDS:
        path = folder / f"{name}-{kind}.onnx"
        given = feeds(path)
        for engine in engines:
            try:
                run = ENGINES[engine](path)
                run(given)
            except Exception as error:
                print(f"{name} {engine} {kind}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
            else:
                yield f"{engine} {kind}", lambda run=run, given=given: run(given)


def timed(folder: Path, name: str, engines: list[str], seconds: float) -> dict[str, float]:
    """Milliseconds of an inference: the median of turns, each the least of some runs."""
    found = dict(runs(folder, name, engines))
    taken: dict[str, list[float]] = {key: [] for key in found}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(taken.values()))) < 5:
        for key, run in found.items():
            several = []
            for _ in range(4):
                begin = time.perf_counter()
                run()
                several.append(time.perf_counter() - begin)
            taken[key].append(1e3 * min(several[1:]))
    return {key: round(statistics.median(times), 4) for key, times in taken.items()}


def show(name: str, times: dict[str, float]) -> None:
    print(f"{name:10}", "  ".join(f"{key} {took:.3f}" for key, took in times.items()))
    for kind in ("fp16", "bf16"):
        mine = times.get(f"ours {kind}")
        if mine is None:
            continue
        peers = [took for key, took in times.items() if key.endswith(kind) and not key.startswith("ours")]
        over = f", over the better peer {min(peers) / mine:.2f}" if peers else ""
        print(f"{'':10} {kind}: over f32 {times['ours fp32'] / mine:.2f}{over}", flush=True)


def loaded(folder: Path, name: str) -> None:
    """Loads each twin in a process of its own, and says how long it takes and what memory it needs."""
    for kind in KINDS:
        command = [sys.executable, __file__, "one", "--folder", str(folder), "--only", f"{name}-{kind}"]
        runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(3)]
        best = min(runs, key=lambda run: run["seconds"])
        print(f"{name} {kind}: {best['seconds']:.3f} s, {best['kept_mb']:.0f} MB kept, {best['peak_mb']:.0f} at most")


def one(path: Path) -> None:
    """Loads one network here."""
    from tunewright import Core

    given, before = feeds(path), _resident()
    begin = time.perf_counter()
    run = Core().compile_model(path, "CPU")
    run(given)
    took = time.perf_counter() - begin
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": took, "kept_mb": _resident() - before, "peak_mb": most - before}))


def _resident() -> float:
    """MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "time", "load", "one"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--engines", default="ours,ort,openvino")
    parser.add_argument("--seconds", type=float, default=4, help="for each network")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name]
    if args.what == "make":
        return make(args.folder, names)
    if args.what == "one":
        return one(args.folder / f"{names[0]}.onnx")
    for name in names or sorted(p.name.removesuffix("-fp32.onnx") for p in args.folder.glob("*-fp32.onnx")):
        if args.what == "load":
            loaded(args.folder, name)
        else:
            show(name, timed(args.folder, name, args.engines.split(","), args.seconds))
    return None


if __name__ == "__main__":
    main()
