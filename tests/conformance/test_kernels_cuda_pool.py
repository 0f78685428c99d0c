"""Poolings of CUDA devices, plain and with channels last, in Triton's interpreter, against their references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.cuda_cases import Made
from tunewright.ir.graph import Fused
from tunewright.ir.types import NHWC, PLAIN, Layout
from tunewright.solvers.base import solvers
from tunewright.testing.kernelcheck import Case, check

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tunewright.devices.cuda.device import CudaDevice

# The interpreter computes masked lanes too, with numpy, which warns of what becomes of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MADE = Made()
RNG, normal = MADE.rng, MADE.normal
LAYOUTS = pytest.mark.parametrize("layout", [PLAIN, NHWC], ids=str)
K33 = {"kernel_shape": (3, 3)}
WINDOWS: tuple[dict[str, Any], ...] = (
    K33,
    {**K33, "strides": (2, 2), "pads": (1, 1, 1, 1)},
    {**K33, "strides": (2, 3), "pads": (0, 1, 1, 0), "ceil_mode": 1},
    {"kernel_shape": (2, 4), "dilations": (2, 2), "strides": (1, 2)},
    {**K33, "auto_pad": "SAME_UPPER", "strides": (2, 2)},
    {"kernel_shape": (2, 2), "auto_pad": "SAME_LOWER"},
    {"kernel_shape": (1, 1), "strides": (2, 2)},
    {"kernel_shape": (3, 5), "pads": (1, 2, 1, 2)},
    {"kernel_shape": (11, 3), "pads": (2, 2, 2, 2), "dilations": (1, 2)},  # too many taps to be written out
)
Array = np.ndarray[Any, Any]


def odd() -> Array:
    x = normal(1, 3, 9, 11)
    x[0, 0, 3, 4], x[0, 0, 8, 10], x[0, 1, 2, 2], x[0, 1, 6, 6], x[0, 2] = np.nan, -np.nan, np.inf, -np.inf, -np.inf
    return x


def failures(
    device: CudaDevice, op: str, x: Array, attrs: dict[str, Any], layout: Layout = PLAIN, outputs: int = 1,
    configs: int = 0,
) -> list[str]:  # fmt: skip
    return check(Case(op, [x], attrs, outputs, layouts=(layout, layout)), "triton.pool", configs, device)


#: an average counts its padding in every second window, and in the others of the other layout
POOLS = {
    f"{op} {number}, {layout}": Case(op, [normal(1, 3, 8, 9)], {**attrs, **more}, layouts=(layout, layout))
    for layout in (PLAIN, NHWC)
    for number, attrs in enumerate(WINDOWS)
    for op, more in (("MaxPool", {}), ("AveragePool", {"count_include_pad": int(layout == PLAIN) ^ number % 2}))
}


@pytest.mark.parametrize("name", POOLS)
def test_windows(name: str, device: CudaDevice) -> None:
    assert check(POOLS[name], "triton.pool", 0, device) == []


@LAYOUTS
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_other_ranks(op: str, layout: Layout, device: CudaDevice) -> None:
    one, three = normal(2, 5, 13), normal(1, 3, 5, 6, 7)
    assert not failures(device, op, one, {"kernel_shape": (3,), "strides": (2,), "pads": (1, 1)}, layout)
    attrs = {"kernel_shape": (2, 3, 2), "strides": (2, 1, 2), "pads": (1, 0, 1, 0, 1, 1), "ceil_mode": 1}
    assert not failures(device, op, three, attrs, layout)


@LAYOUTS
def test_ceiling_beyond_the_padding(layout: Layout, device: CudaDevice) -> None:
    attrs = {**K33, "pads": (1, 1, 1, 1), "count_include_pad": 1, "strides": (3, 3), "ceil_mode": 1}
    assert not failures(device, "AveragePool", normal(1, 3, 9, 11), attrs, layout)


@LAYOUTS
@pytest.mark.parametrize("p", [1, 2, 3])
def test_powers(p: int, layout: Layout, device: CudaDevice) -> None:
    attrs = {**K33, "p": p, "strides": (2, 2), "pads": (1, 1, 1, 1)}
    assert not failures(device, "LpPool", normal(2, 3, 9, 11), attrs, layout)
    assert not failures(device, "GlobalLpPool", normal(2, 3, 9, 11), {"p": p}, layout)


@pytest.mark.parametrize("order", [0, 1])
def test_indices(order: int, device: CudaDevice) -> None:
    """The first of equal ones counts; NaN is never larger; a window may begin in the padding."""
    few = RNG.integers(0, 3, (1, 2, 8, 9)).astype(np.float32)
    for x, attrs in ((few, WINDOWS[3]), (few, WINDOWS[8]), (odd(), WINDOWS[1])):
        assert not failures(device, "MaxPool", x, {**attrs, "storage_order": order}, outputs=2)
    three = RNG.integers(0, 3, (1, 2, 5, 6, 7)).astype(np.float32)
    assert not failures(device, "MaxPool", three, {"kernel_shape": (2, 3, 2), "storage_order": order}, outputs=2)


@LAYOUTS
@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_floats(dtype: Any, layout: Layout, device: CudaDevice) -> None:
    x = normal(1, 10, 7, 8, dtype=dtype)
    for op in ("MaxPool", "AveragePool"):
        assert not failures(device, op, x, WINDOWS[1], layout, configs=int(op == "AveragePool"))
    assert not failures(device, "GlobalAveragePool", x, {}, layout)


@LAYOUTS
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_integers(dtype: Any, layout: Layout, device: CudaDevice) -> None:
    x = RNG.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (1, 5, 7, 8), dtype=dtype)
    assert not failures(device, "MaxPool", x, WINDOWS[1], layout)
    assert not failures(device, "MaxPool", x, {**WINDOWS[1], "pads": (2, 2, 2, 2), "dilations": (2, 2)}, layout)


@LAYOUTS
def test_infinities_and_nan(layout: Layout, device: CudaDevice) -> None:
    for op in ("MaxPool", "AveragePool"):
        assert not failures(device, op, odd(), WINDOWS[1], layout)
    for op in ("GlobalMaxPool", "GlobalAveragePool"):
        assert not failures(device, op, odd(), {}, layout)


def test_wide_windows(device: CudaDevice) -> None:
    wide = {"kernel_shape": (3,), "dilations": (1200,), "pads": (900, 800)}
    assert not failures(device, "MaxPool", normal(1, 1, 3000), wide)
    assert not failures(device, "AveragePool", normal(1, 2, 70), {"kernel_shape": (60,), "pads": (30, 30)})
    assert not failures(device, "MaxPool", normal(0, 3, 9, 9), K33)


GLOBAL = {
    f"{op} of {shape}, {layout}": Case(op, [normal(*shape)], layouts=(layout, layout))
    for op in ("GlobalMaxPool", "GlobalAveragePool")
    for layout in (PLAIN, NHWC)
    for shape in ((2, 19, 7, 7), (1, 3, 50), (1, 9, 3, 4, 5), (3, 8, 1, 1))
}


@pytest.mark.parametrize("name", GLOBAL)
def test_global(name: str, device: CudaDevice) -> None:
    assert check(GLOBAL[name], "triton.pool", 0, device) == []


@LAYOUTS
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "GlobalAveragePool"])
def test_epilogues(op: str, layout: Layout, device: CudaDevice) -> None:
    attrs: dict[str, Any] = {} if op.startswith("Global") else WINDOWS[1]
    shape = (1, 5, 1, 1) if op.startswith("Global") else (1, 5, 5, 6)
    steps = (Fused("Relu", (~0,)), Fused("Mul", (~1, 1)), Fused("Add", (~2, 2)), Fused("Sigmoid", (~3,)))
    inputs = [normal(1, 5, 9, 11), normal(5, 1, 1), normal(*shape)]
    case = Case(op, inputs, attrs, epilogue=steps, operands=2, layouts=(layout, layout))
    assert not check(case, "triton.pool", configs=0, device=device)


def default_of(device: CudaDevice, op: str, x: Array, attrs: dict[str, Any]) -> str:
    problem = Case(op, [x], attrs).problem()
    return next(s.id for s in solvers() if s.language == "cuda" and s.why_not(problem, device.target) is None)


def test_defaults(device: CudaDevice) -> None:
    """A window over everything is a reduction."""
    x = normal(1, 4, 6, 6)
    assert default_of(device, "AveragePool", x, K33) == default_of(device, "MaxPool", x, K33) == "triton.pool"
    for op, attrs in (("GlobalAveragePool", {}), ("AveragePool", {"kernel_shape": (6, 6)})):
        assert default_of(device, op, x, attrs) == "triton.pool_global"


def test_average_pooling_stays_on_the_device(device: CudaDevice, tmp_path: Path) -> None:
    """Between convolutions, whose channels lie last, in half precision."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from tunewright import Core
    from tunewright.plugins.single import SingleDevice
    from tunewright.settings import Settings

    weights = {"v": normal(8, 3, 3, 3) / 5, "w": normal(6, 8, 1, 1) / 3}
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("AveragePool", ["a"], ["b"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["b", "w"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "averages", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 9, 9])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), tmp_path / "m.onnx")
    model = Core().read_model(tmp_path / "m.onnx")
    compiled = SingleDevice(device).compile(model, Settings.make({"USER_DB_PATH": str(tmp_path)}))
    feed = {"x": normal(1, 3, 9, 9)}
    got, want = compiled(feed)["y"], Core().compile_model(model, "CPU.HOST")(feed)["y"]
    assert np.abs(got - want).max() <= 1e-2 * np.abs(want).max()
    steps = [step for plan in compiled.program.plans for step in plan.steps]
    assert not any(step.on_host for step in steps)
    assert {"triton.pool", "triton.pool_global"} <= {step.kernel.name for step in steps}


@pytest.mark.soak
@LAYOUTS
@pytest.mark.parametrize("attrs", WINDOWS)
def test_many_configs(attrs: dict[str, Any], layout: Layout, device: CudaDevice) -> None:
    x = normal(2, 19, 9, 11, dtype=np.float16)
    assert not failures(device, "MaxPool", x, attrs, layout, configs=20)
    for include in (0, 1):
        assert not failures(device, "AveragePool", x, {**attrs, "count_include_pad": include}, layout, configs=20)
