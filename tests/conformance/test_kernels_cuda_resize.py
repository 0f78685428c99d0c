"""Triton's Resize and transposed convolutions against their references, in its interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.cuda_cases import Made
from tunewright.ir.graph import Fused
from tunewright.ir.types import NHWC, PLAIN, Layout
from tunewright.testing.kernelcheck import Case, check

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tunewright.devices.cuda.device import CudaDevice

# The interpreter computes masked lanes too, with numpy, which warns of what becomes of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
RNG = Made().rng
F16, BF16, F32 = np.float16, ml_dtypes.bfloat16, np.float32
RELU, SIGMOID = (Fused("Relu", (~0,)),), (Fused("Sigmoid", (~0,)),)


def normal(*shape: int, dtype: Any = F16) -> np.ndarray:
    return np.asarray(RNG.standard_normal(shape) * 3).astype(dtype)


# ---- Resize ---------------------------------------------------------------------------------------------------------


def resize(
    x: np.ndarray, layout: Layout = NHWC, *, scales: Any = (), sizes: Any = (), roi: Any = (), epilogue: Any = (),
    operands: Any = (), **attrs: Any,
) -> Case:  # fmt: skip
    inputs = [x, np.array(roi, np.float32) if roi else None, np.array(scales, np.float32) if scales else None,
              np.array(sizes) if sizes else None, *operands]  # fmt: skip
    constant = frozenset(i for i in (1, 2, 3) if inputs[i] is not None)
    return Case(
        "Resize", inputs, attrs, constant=constant, epilogue=epilogue, operands=len(operands), layouts=(layout, layout)
    )


TWICE = (1, 1, 2, 2)
RESIZES = {
    "twice, as torch says it": resize(
        normal(1, 16, 4, 5), scales=TWICE, coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    ),
    "twice, plain": resize(
        normal(2, 3, 4, 5), PLAIN, scales=TWICE, coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    ),
    "odd": resize(normal(2, 7, 5, 6), scales=(1, 1, 1.7, 2.3)),
    "odd, plain": resize(normal(2, 7, 5, 6), PLAIN, scales=(1, 1, 1.7, 2.3)),
    "bytes": resize(RNG.integers(0, 255, (1, 3, 6, 5), np.uint8), PLAIN, sizes=(1, 3, 9, 4)),
    "linear": resize(normal(1, 19, 4, 5), scales=TWICE, mode="linear"),
    "linear, plain": resize(normal(1, 5, 4, 5), PLAIN, sizes=(1, 5, 7, 11), mode="linear"),
    "corners": resize(normal(1, 9, 4, 5), sizes=(1, 9, 7, 3), mode="linear",
                      coordinate_transformation_mode="align_corners"),
    "one row": resize(normal(1, 9, 4, 5, dtype=F32), sizes=(1, 9, 4, 11), mode="linear",
                      coordinate_transformation_mode="half_pixel_symmetric"),
    "single pixels": resize(normal(1, 9, 4, 5), sizes=(1, 9, 1, 1), mode="linear",
                            coordinate_transformation_mode="pytorch_half_pixel"),
    "cubic": resize(normal(1, 5, 4, 6, dtype=F32), scales=TWICE, mode="cubic"),
    "cubic without what is outside": resize(
        normal(1, 3, 5, 5, dtype=F32), PLAIN, sizes=(1, 3, 8, 9), mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1
    ),
    "smooth": resize(normal(1, 5, 9, 12, dtype=F32), sizes=(1, 5, 4, 5), mode="linear", antialias=1),
    "smooth and cubic": resize(normal(1, 3, 7, 8), sizes=(1, 3, 3, 4), mode="cubic", antialias=1),
    "part of it": resize(
        normal(1, 3, 6, 7, dtype=F32), sizes=(1, 3, 5, 5), roi=(0, 0, -0.3, 0.2, 1, 1, 0.8, 1.3), mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=2.5,
    ),
    "part of it, nearest": resize(
        normal(1, 3, 6, 7), PLAIN, sizes=(1, 3, 5, 5), roi=(0, 0, -0.3, 0.2, 1, 1, 0.8, 1.3),
        coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=-1.0,
    ),
    "one axis": resize(normal(2, 3, 10), PLAIN, scales=(1, 1, 1.7), nearest_mode="ceil"),
    "three axes": resize(normal(1, 4, 3, 4, 3), scales=(1, 1, 2, 1.5, 2), mode="linear"),
    "channels too": resize(normal(1, 4, 3, 3), sizes=(1, 6, 5, 3)),
    "bfloat16": resize(normal(1, 8, 3, 4, dtype=BF16), scales=TWICE, mode="linear"),
    "double": resize(normal(1, 3, 3, 4, dtype=np.float64), PLAIN, scales=TWICE, mode="linear"),
    "activation": resize(normal(1, 17, 3, 4), scales=TWICE, mode="linear", epilogue=RELU),
    "residual": resize(
        normal(1, 17, 3, 4), scales=TWICE, epilogue=(Fused("Add", (~0, 4)),), operands=(normal(1, 17, 6, 8),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESIZES)
def test_resize(name: str, device: CudaDevice) -> None:
    assert check(RESIZES[name], "triton.resize", configs=int(name in ("odd", "linear")), device=device) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", RESIZES)
def test_resize_in_many_configs(name: str, device: CudaDevice) -> None:
    assert check(RESIZES[name], "triton.resize", configs=20, device=device) == []


# ---- ConvTranspose --------------------------------------------------------------------------------------------------


def transposed(
    x: tuple[int, ...], out: int, kernel: tuple[int, ...], *, bias: bool = True, dtype: Any = F16,
    layout: Layout = NHWC, epilogue: Any = (), operands: Any = (), **attrs: Any,
) -> Case:  # fmt: skip
    group = attrs.get("group", 1)
    weights = (normal(x[1], out // group, *kernel, dtype=F32) / np.sqrt(9 * x[1] * np.prod(kernel))).astype(dtype)
    inputs = [normal(*x, dtype=dtype), weights, normal(out, dtype=dtype) if bias else None, *operands]
    return Case(
        "ConvTranspose", inputs, attrs, constant=frozenset({1, 2}), epilogue=epilogue, operands=len(operands),
        layouts=(layout, layout),
    )  # fmt: skip


ONE = (1, 1, 1, 1)
TRANSPOSED = {
    "kernel is stride": transposed((1, 32, 3, 5), 16, (2, 2), strides=(2, 2)),
    "odd channels": transposed((2, 19, 3, 4), 21, (2, 2), strides=(2, 2), bias=False),
    "3x3 s2": transposed((1, 17, 4, 5), 20, (3, 3), strides=(2, 2), pads=ONE, output_padding=(1, 1)),
    "4x4 s2": transposed((1, 16, 3, 5), 9, (4, 4), strides=(2, 2), pads=ONE),
    "stride 1": transposed((1, 10, 4, 5), 16, (3, 3), pads=(0, 1, 2, 1)),
    "dilated": transposed((1, 16, 4, 5), 16, (3, 2), dilations=(2, 3)),
    "stride beyond kernel": transposed((1, 8, 3, 4), 8, (2, 3), strides=(4, 5), output_padding=(3, 0)),
    "output shape": transposed((1, 8, 5, 6), 10, (3, 3), strides=(3, 2), output_shape=(17, 12)),
    "uneven": transposed((1, 12, 3, 4), 7, (3, 2), strides=(3, 1), pads=(1, 0, 0, 1)),
    "same": transposed((1, 12, 3, 4), 7, (5, 3), strides=(2, 2), auto_pad="SAME_UPPER"),
    "one pixel to many": transposed((1, 19, 1, 1), 20, (4, 4)),
    "long sum": transposed((1, 80, 2, 3), 16, (2, 2), strides=(2, 2), epilogue=SIGMOID),
    "residual": transposed(
        (1, 16, 3, 4), 18, (2, 2), strides=(2, 2), epilogue=(Fused("Add", (~0, 3)), Fused("Relu", (~1,))),
        operands=(normal(1, 18, 6, 8),),
    ),
    "per channel": transposed(
        (1, 16, 3, 4), 18, (2, 2), strides=(2, 2), epilogue=(Fused("Mul", (~0, 3)),), operands=(normal(18, 1, 1),)
    ),
    "single precision": transposed((1, 18, 3, 4), 17, (3, 3), strides=(2, 2), dtype=F32),
    "bfloat16": transposed((1, 18, 3, 4), 17, (2, 2), strides=(2, 2), dtype=BF16),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions(name: str, device: CudaDevice) -> None:
    assert check(TRANSPOSED[name], "triton.conv_transpose", configs=int(name == "3x3 s2"), device=device) == []


#: what the library alone takes
LIBRARY = {
    "groups": transposed((1, 12, 3, 4), 8, (3, 3), strides=(2, 2), group=4),
    "depthwise": transposed((1, 12, 3, 4), 12, (4, 4), strides=(2, 2), pads=ONE, group=12, layout=PLAIN),
    "dilated steps": transposed((1, 11, 5, 6), 12, (3, 3), strides=(2, 3), dilations=(3, 2), pads=(2, 1, 0, 3)),
    "one row": transposed((2, 12, 9), 7, (8,), strides=(4,), pads=(2, 2), layout=PLAIN, epilogue=RELU),
    "volume": transposed((1, 5, 3, 2, 3), 4, (3, 2, 2), strides=(2, 1, 3), pads=(1, 0, 0, 1, 1, 0), layout=PLAIN),
}


@pytest.mark.parametrize("name", [*TRANSPOSED, *LIBRARY])
def test_transposed_convolutions_of_the_library(name: str, device: CudaDevice) -> None:
    assert check((TRANSPOSED | LIBRARY)[name], "vendor.conv_transpose", configs=0, device=device) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions_in_many_configs(name: str, device: CudaDevice) -> None:
    assert check(TRANSPOSED[name], "triton.conv_transpose", configs=20, device=device) == []
