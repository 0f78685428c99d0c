"""Kernels of normalisations against their references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.ir.types import blocked
from tunewright.plugins.single import open_device
from tunewright.testing.kernelcheck import Case, check

RNG = np.random.default_rng(0)
MS = "com.microsoft::"
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
Array = np.ndarray[Any, Any]


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.standard_normal(shape).astype(dtype)


def positive(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.uniform(0.5, 2, shape).astype(dtype)


def agrees(
    op: str, inputs: list[Array | None], family: str = "norm", outputs: int = 1, shapes: bool = False, **attrs: Any
) -> None:
    """``shapes``: the specialised solver too, in some configs; it has the same text, so not everywhere."""
    case = Case(op, inputs, attrs, outputs)
    assert not check(case, f"opencl.{family}", configs=1 if shapes else 0, specialised=shapes)


# -- layer, RMS -------------------------------------------------------------------------------------------------------
@every_other(("dtype", DTYPES), ("axis", [-1, 1, 0]))
def test_layer(dtype: Any, axis: int) -> None:
    shape = (3, 5, 37)
    parameters = [normal(*shape[axis:], dtype=dtype) for _ in range(2)]
    agrees("LayerNormalization", [normal(*shape, dtype=dtype), *parameters], outputs=3, axis=axis)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4097), (300, 64), (2, 128, 384), (0, 4)])
def test_layer_sizes(shape: tuple[int, ...]) -> None:
    x = normal(*shape) * 3 + 1
    agrees("LayerNormalization", [x, normal(shape[-1]), normal(shape[-1])], outputs=3, shapes=True, epsilon=1e-6)
    agrees("LayerNormalization", [x, normal(shape[-1])])


@pytest.mark.parametrize(
    ("scale", "bias"), [((5,), (4, 5)), ((4, 1), (5,)), ((), (1,)), ((3, 1, 1), (3, 4, 5)), ((4, 5), (3, 4, 1))]
)
def test_layer_broadcast_parameters(scale: tuple[int, ...], bias: tuple[int, ...]) -> None:
    agrees("LayerNormalization", [normal(3, 4, 5), normal(*scale), normal(*bias)], axis=1)


def test_layer_of_a_large_mean() -> None:
    """One pass over squares would lose every digit."""
    agrees("LayerNormalization", [normal(4, 1000) + 30, normal(1000), normal(1000)], outputs=3)


def test_layer_of_a_long_row() -> None:
    agrees("LayerNormalization", [normal(2, 1 << 20) + 5, positive(1)], axis=1)


def test_layer_of_odd_numbers() -> None:
    x = normal(6, 40)
    x[0, 3], x[1, 5], x[2, 7] = np.nan, np.inf, -np.inf
    x[3] = 7.0
    x[4] *= 1e18
    agrees("LayerNormalization", [x, positive(40), normal(40)], outputs=3)
    agrees("RMSNormalization", [x, positive(40)])
    agrees("LpNormalization", [x])


def test_layer_stashes_another_type() -> None:
    x, scale = normal(3, 8, dtype=np.float16), normal(8, dtype=np.float16)
    agrees("LayerNormalization", [x, scale], outputs=3, stash_type=10)


@pytest.mark.parametrize(("dtype", "scale"), [*((d, d) for d in DTYPES), (np.float16, np.float32)])
def test_rms(dtype: Any, scale: Any) -> None:
    agrees("RMSNormalization", [normal(3, 4, 65, dtype=dtype), normal(65, dtype=scale)])
    agrees("SimplifiedLayerNormalization", [normal(7, 33, dtype=dtype), normal(33, dtype=scale)], outputs=2, axis=-1)


@every_other(("dtype", [np.float32, np.float16]), ("skip", [(2, 5, 48), (1, 5, 48), (5, 48)]))
def test_skip(dtype: Any, skip: tuple[int, ...]) -> None:
    x, s = normal(2, 5, 48, dtype=dtype), normal(*skip, dtype=dtype)
    gamma, beta, bias = (normal(48, dtype=dtype) for _ in range(3))
    single = dtype is np.float32
    agrees(MS + "SkipLayerNormalization", [x, s, gamma, beta, bias], outputs=4, shapes=single, epsilon=1e-5)
    agrees(MS + "SkipLayerNormalization", [x, s, gamma], epsilon=1e-5)
    agrees(MS + "SkipSimplifiedLayerNormalization", [x, s, gamma, bias], outputs=4, epsilon=1e-5)


@pytest.mark.parametrize("integers", [np.int32, np.int64])
@pytest.mark.parametrize("full", [False, True])
def test_embed(integers: Any, full: bool) -> None:
    ids, segments = RNG.integers(0, 30, (3, 7)).astype(integers), RNG.integers(0, 2, (3, 7)).astype(integers)
    word, position, segment, gamma, beta = normal(30, 24), normal(9, 24), normal(2, 24), normal(24), normal(24)
    mask, positions = (RNG.integers(0, hi, (3, 7)).astype(integers) for hi in (2, 9))
    if full:
        inputs: list[Array | None] = [ids, segments, word, position, segment, gamma, beta, mask, positions]
    else:
        inputs = [ids, None, word, position, None, gamma, beta]
    agrees(MS + "EmbedLayerNormalization", inputs, outputs=3 if full else 2, epsilon=1e-6)


# -- instance, group, mean-variance, Lp -------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_instance_and_group(dtype: Any) -> None:
    for shape in ((2, 6, 7, 9), (1, 4, 33)):
        x, scale, bias = (normal(*s, dtype=dtype) for s in (shape, shape[1:2], shape[1:2]))
        agrees("InstanceNormalization", [x, scale, bias])
        agrees("GroupNormalization", [x, scale, bias], shapes=dtype is np.float32, num_groups=2, epsilon=1e-2)


def test_group_edges() -> None:
    agrees("GroupNormalization", [normal(3, 6), normal(6), normal(6)], num_groups=3)
    agrees("GroupNormalization", [normal(3, 6, 5), normal(6), normal(6)], num_groups=6)
    agrees("GroupNormalization", [normal(1, 6, 1, 1), normal(6), normal(6)], num_groups=1)
    agrees("GroupNormalization", [normal(0, 6, 5), normal(6), normal(6)], num_groups=2)
    agrees("InstanceNormalization", [normal(2, 3, 1, 1), normal(3), normal(3)])


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((3, 4, 5, 6), None), ((3, 4, 5, 6), (1, 3)), ((3, 4, 5, 6), (0, 2)), ((3, 4, 5, 131), (1,)), ((2, 3, 4), (-1, 0)),
     ((3, 4), (0, 1)), ((1, 7, 3, 3), None), ((2, 3, 300), (0, 1))],
)  # fmt: skip
def test_mean_variance(shape: tuple[int, ...], axes: tuple[int, ...] | None) -> None:
    attrs: dict[str, Any] = {} if axes is None else {"axes": axes}
    agrees("MeanVarianceNormalization", [normal(*shape)], shapes=True, **attrs)


@every_other(("dtype", DTYPES), ("p", [1, 2]))
def test_lp(dtype: Any, p: int) -> None:
    x = normal(3, 5, 70, dtype=dtype)
    x[1] = 0
    for axis in (-1, 1, 0):
        agrees("LpNormalization", [x], p=p, axis=axis)


# -- batch ------------------------------------------------------------------------------------------------------------
def batch_inputs(shape: tuple[int, ...], dtype: Any = np.float32, parameters: Any = None) -> list[Array | None]:
    kind, c = parameters or dtype, shape[1]
    return [normal(*shape, dtype=dtype), positive(c, dtype=kind), normal(c, dtype=kind), normal(c, dtype=kind),
            positive(c, dtype=kind)]  # fmt: skip


@pytest.mark.parametrize(("dtype", "parameters"), [*((d, d) for d in DTYPES), (np.float16, np.float32)])
def test_batch(dtype: Any, parameters: Any) -> None:
    for shape in ((2, 5, 7, 9), (1, 64, 130), (7, 300), (1, 1), (0, 3, 4)):
        inputs = batch_inputs(shape, dtype, parameters)
        agrees("BatchNormalization", inputs, "norm_batch", shapes=dtype is np.float32, epsilon=1e-3)


@pytest.mark.parametrize("shape", [(2, 5, 7, 9), (1, 16, 33), (3, 20, 4, 4)])
def test_batch_blocked(shape: tuple[int, ...]) -> None:
    layout = blocked(open_device("CPU").target.vector_bytes // 4)
    case = Case("BatchNormalization", batch_inputs(shape), layouts=(layout, layout))
    assert not check(case, "opencl.norm_batch", configs=1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_batch_training(dtype: Any) -> None:
    for shape in ((4, 3, 5, 2), (9, 6)):
        inputs = batch_inputs(shape, dtype)
        agrees("BatchNormalization", inputs, "norm_batch", 3, training_mode=1, momentum=0.7)
    agrees("BatchNormalization", inputs, "norm_batch", training_mode=1)


# -- LRN --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_lrn(dtype: Any) -> None:
    for shape in ((2, 7, 3, 4), (1, 3, 300), (2, 1, 5), (2, 9)):
        agrees("LRN", [normal(*shape, dtype=dtype)], "lrn", size=3)
    agrees("LRN", [normal(2, 7, 3, 4, dtype=dtype)], "lrn", size=5, alpha=0.5, beta=0.6, bias=2.0)


def test_lrn_windows() -> None:
    x = normal(1, 4, 6, 6)
    x[0, 1, 2, 3], x[0, 2, 0, 0] = np.nan, np.inf
    for size in (1, 2, 4, 30):
        agrees("LRN", [x], "lrn", shapes=True, size=size, alpha=1.0)
