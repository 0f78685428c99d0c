"""What the passes for GPUs make of moving, joining and squeezing: right results, and few launches."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from conformance.cuda_cases import Made
from conformance.interpreter import ON_GPU
from tunewright.core import Core
from tunewright.ir.types import NHWC, PLAIN, DType
from tunewright.ops import lookup
from tunewright.ops.internal.pieces import PIECES, Piece, PieceStep, Read, parts, text
from tunewright.ops.internal.pixels import PIXELS
from tunewright.plugins.single import SingleDevice
from tunewright.testing.kernelcheck import Case, check

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tunewright.devices.cuda.device import CudaDevice

# The interpreter computes masked lanes too, with numpy, which warns of what becomes of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MADE = Made()
RNG, normal = MADE.rng, MADE.normal
NOTHING = {"USER_DB_PATH": "/nonexistent", "SYSTEM_DB_PATH": "/nonexistent", "HEURISTIC_PATH": ""}


def sample() -> Case:
    spec = lookup(PIECES)
    assert spec is not None and spec.samples is not None
    (only,) = spec.samples(RNG)
    return Case(PIECES, only.inputs, only.attrs)


def of_image(*boxes: Piece, dims: tuple[int, ...], first: Any = NHWC, result: Any = PLAIN) -> Case:
    attrs = {"dims": dims, "dtype": DType.FLOAT16.onnx_code, "parts": text(boxes)}
    return Case(PIECES, [normal(2, 6, 4, 5, dtype=np.float16)], attrs, layouts=(first, result))


#: [2, 6, 4, 5] as [2, 2, 4, 5, 3]: channels in two groups of three, turned
TURNED = Read(0, 0, (((2, 120),), ((2, 60),), ((4, 5),), ((5, 1),), ((3, 20),)))
#: pixels in one row, twice each; channels 1 to 4
ROWS = Read(0, 20, (((2, 120),), ((4, 20),), ((20, 1), (2, 0))))
SIGMOID = (PieceStep("Sigmoid", (0,), DType.FLOAT16, {}),)
BOXES = {
    "sample": sample(),
    "turned": of_image(Piece((0,) * 5, (2, 2, 4, 5, 3), (TURNED,), SIGMOID), dims=(2, 2, 4, 5, 3)),
    "turned, plain": of_image(Piece((0,) * 5, (2, 2, 4, 5, 3), (TURNED,)), dims=(2, 2, 4, 5, 3), first=PLAIN),
    "rows": of_image(Piece((0,) * 3, (2, 4, 40), (ROWS,)), dims=(2, 4, 40)),
    "rows to channels last": of_image(Piece((0,) * 3, (2, 4, 40), (ROWS,), SIGMOID), dims=(2, 4, 40), result=NHWC),
}


@pytest.mark.parametrize("name", BOXES)
def test_boxes(name: str, device: CudaDevice) -> None:
    assert check(BOXES[name], "triton.pieces", configs=1, device=device) == []


def test_what_is_not_along_axes_is_refused(device: CudaDevice) -> None:
    across = Read(0, 3, (((2, 120),), ((4, 1),)))  # from one row of pixels into the next
    case = of_image(Piece((0, 0), (2, 4), (across,)), dims=(2, 4))
    assert "no solver accepts" in check(case, "triton.pieces", device=device)[0]
    assert parts(case.attrs)[0].reads == (across,)
    beyond = Read(0, 239, (((2, 1),),))
    with pytest.raises(ValueError, match="239 to 240 are read of 240"):
        lookup(PIECES).reference(  # type: ignore[union-attr]
            [normal(2, 6, 4, 5)], {"dims": (2,), "dtype": 1, "parts": text([Piece((0,), (2,), (beyond,))])}, 1
        )


PIXEL = {
    "to halves": ((2, 3, 7, 9), np.float32, DType.FLOAT16, (0, 0, 0, 0)),
    "as they are": ((1, 3, 8, 16), np.float16, DType.FLOAT16, (3, 3, 2, 2)),
    "single": ((3, 3, 1, 5), np.float32, DType.FLOAT32, (0, 1, 2, 0)),
}


@pytest.mark.parametrize("name", PIXEL)
def test_pixels(name: str, device: CudaDevice) -> None:
    shape, given, made, pads = PIXEL[name]
    attrs = {"channels": 4, "dtype": made.onnx_code, "pads": pads}
    case = Case(PIXELS, [normal(*shape, dtype=given)], attrs, layouts=(PLAIN, NHWC))
    assert check(case, "triton.pixels", configs=2, device=device) == []


# ---- graphs ---------------------------------------------------------------------------------------------------------


def network(nodes: list[Any], inputs: dict[str, tuple[int, ...]], output: str, **constants: np.ndarray) -> bytes:
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()]
    made = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)]
    kept = [onnx.numpy_helper.from_array(v, n) for n, v in constants.items()]
    graph = helper.make_graph(nodes, "test", given, made, kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> Any:
    return helper.make_node(op, inputs.split(" "), outputs.split(), **attrs)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


HEAD = network(
    [
        node("Conv", "x w", "c"), node("Reshape", "c five", "r"), node("Transpose", "r", "t", perm=(0, 1, 3, 4, 2)),
        node("Sigmoid", "t", "s"), node("Split", "s sizes", "xy wh score", axis=4),
        node("Mul", "xy two", "xy2"), node("Add", "xy2 grid", "xyg"), node("Mul", "wh two", "wh2"),
        node("Pow", "wh2 two", "whp"), node("Concat", "xyg whp score", "all", axis=4),
        node("Reshape", "all three", "y"),
    ],
    {"x": (2, 16, 4, 5)}, "y", w=normal(21, 16, 1, 1), five=ints(2, 3, 7, 4, 5), three=ints(2, 60, 7),
    sizes=ints(2, 2, 3), two=np.array(2, np.float32), grid=normal(1, 1, 4, 5, 2),
)  # fmt: skip
UP = network(
    [
        node("Conv", "x w", "a"), node("Conv", "y w", "b"),
        node("Resize", "a  scales", "u", mode="nearest", coordinate_transformation_mode="asymmetric",
             nearest_mode="floor"),
        node("Concat", "u b", "c", axis=1), node("Conv", "c v", "z"),
    ],
    {"x": (1, 16, 3, 4), "y": (1, 16, 6, 8)}, "z", w=normal(24, 16, 1, 1), v=normal(16, 48, 1, 1) / 7,
    scales=np.array([1, 1, 2, 2], np.float32),
)  # fmt: skip
SHARED = network(
    [
        node("Relu", "x", "r"), node("Transpose", "r", "t", perm=(0, 2, 1)), node("Sigmoid", "r", "s"),
        node("Slice", "t zero two one", "cut"), node("Add", "cut bias", "y0"),
        node("ReduceSum", "s", "total", keepdims=0), node("Mul", "y0 total", "y"),
    ],
    {"x": (2, 3, 5)}, "y", zero=ints(1), two=ints(4), one=ints(1), bias=normal(3),
)  # fmt: skip
EXCITED = network(
    [
        node("Conv", "x w", "d"), node("Relu", "d", "a"), node("GlobalAveragePool", "a", "p"),
        node("Conv", "p down db", "h"), node("Relu", "h", "hr"), node("Conv", "hr up ub", "f"),
        node("HardSigmoid", "f", "s", alpha=1 / 6), node("Mul", "s a", "y"), node("Conv", "y v", "z"),
    ],
    {"x": (2, 8, 5, 4)}, "z", w=normal(24, 8, 1, 1), down=normal(6, 24, 1, 1), db=normal(6), up=normal(24, 6, 1, 1),
    ub=normal(24), v=normal(8, 24, 1, 1),
)  # fmt: skip
NORM = network(
    [
        node("BatchNormalization", "x s b m v", "n"), node("Relu", "n", "r"), node("Conv", "r w", "y"),
    ],
    {"x": (2, 16, 3, 4)}, "y", s=normal(16), b=normal(16), m=normal(16), v=normal(16) ** 2 + 0.1, w=normal(8, 16, 1, 1),
)  # fmt: skip
PICTURE = network(
    [node("Conv", "x w b", "c", pads=(3, 3, 3, 3), strides=(2, 2)), node("Relu", "c", "y")],
    {"x": (2, 3, 11, 16)}, "y", w=normal(16, 3, 7, 7) / 12, b=normal(16),
)  # fmt: skip
SAME = network(
    [node("Conv", "x w", "c", auto_pad="SAME_UPPER", strides=(2, 2)), node("Relu", "c", "y")],
    {"x": (2, 3, 11, 16)}, "y", w=normal(16, 3, 7, 7) / 12,
)  # fmt: skip
SKIPPED = network(
    [node("MatMul", "x w", "m"), node("Add", "b m", "mb"), node("Add", "x mb", "s"),
     node("LayerNormalization", "s scale shift", "n", axis=-1), node("MatMul", "n w", "k"), node("Add", "k n", "t"),
     node("LayerNormalization", "t scale", "y", axis=2)],
    {"x": (2, 5, 24)}, "y", w=normal(24, 24) / 5, b=normal(24), scale=normal(24), shift=normal(24),
)  # fmt: skip
#: the network; kernels that take it over, and how many steps are left at most
NETWORKS = {
    "head": (HEAD, "triton.pieces", 3),
    "up": (UP, "triton.pieces", 8),
    "shared": (SHARED, "triton.pieces", 5),
    "norm": (NORM, "triton.elementwise", 5),
    "excited": (EXCITED, "triton.squeeze", 5),
    "skipped": (SKIPPED, "triton.norm", 6),
    "picture": (PICTURE, "triton.pixels", 3),
    "picture, as wide as needed": (SAME, "triton.pixels", 4),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("precision", ["F16", "F32"])
def test_networks(name: str, precision: str, device: CudaDevice) -> None:
    data, solver, most = NETWORKS[name]
    core = Core({**NOTHING, "INFERENCE_PRECISION_HINT": precision})
    model = core.read_model(data)
    inputs = {v.name: normal(*v.type.dims) for v in model.graph.inputs}  # type: ignore[union-attr]
    compiled = SingleDevice(device).compile(model, core.settings)
    got = compiled(inputs)
    want = core.compile_model(core.read_model(data), "CPU.HOST")(inputs)
    steps = [s for plan in compiled.program.plans for s in plan.steps if not s.optimized_out]
    used = [s.choice.solver.id for s in steps if s.choice is not None]
    assert len(steps) <= most and not any(s.on_host for s in steps), used
    # what is best for so small a picture depends on the device
    assert solver in used or (ON_GPU and solver == "triton.pixels"), used
    for key, value in want.items():
        error = np.abs(got[key] - value).max() / np.abs(value).max()
        assert error < (2e-5 if precision == "F32" else 1e-2)


def test_a_switch_keeps_the_nodes(device: CudaDevice) -> None:
    core = Core({**NOTHING, "DISABLED_PASSES": "pieces,squeeze-excite"})
    for data in (HEAD, EXCITED):
        model = core.read_model(data)
        compiled = SingleDevice(device).compile(model, core.settings)
        compiled({v.name: normal(*v.type.dims) for v in model.graph.inputs})  # type: ignore[union-attr]
        ops = {s.node.op for plan in compiled.program.plans for s in plan.steps}
        assert not any(op.startswith("tunewright::") and op != "tunewright::Reorder" for op in ops)


# ---- the networks of the benchmark ----------------------------------------------------------------------------------


@pytest.mark.skipif(ON_GPU, reason="bench/gpu.py runs them there")
@pytest.mark.parametrize(("name", "most"), [("yolo", 79), ("unet", 32), ("efficientnet", 16)])
def test_networks_run_whole_and_in_few_launches(name: str, most: int, tmp_path: Path) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    import torch

    import gpu_ours
    import gpu_sources

    case = gpu_sources.make(f"{name}:1", torch.device("cpu"), tiny=True)
    gpu_sources.export(case, tmp_path / "model.onnx")
    about = gpu_ours.about(gpu_ours.compile_model(tmp_path / "model.onnx", gpu_ours.INTERPRETER, gpu_ours.EMPTY))
    assert about["host"] == [] and about["steps"] <= most
    assert not any("Reorder" in op for op in about["solvers"])
