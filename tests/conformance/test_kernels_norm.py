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

MS = "com.microsoft::"
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
Array = np.ndarray[Any, Any]


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Array:
    return rng.standard_normal(shape).astype(dtype)


def positive(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Array:
    return rng.uniform(0.5, 2, shape).astype(dtype)


def agrees(
    op: str, inputs: list[Array | None], family: str = "norm", outputs: int = 1, shapes: bool = False, **attrs: Any
) -> None:
    """``shapes``: the specialised solver too, in some configs; it has the same text, so not everywhere."""
    case = Case(op, inputs, attrs, outputs)
    assert not check(case, f"opencl.{family}", configs=1 if shapes else 0, specialised=shapes)


# -- layer, RMS -------------------------------------------------------------------------------------------------------
@every_other(("dtype", DTYPES), ("axis", [-1, 1, 0]))
def test_layer(rng: np.random.Generator, dtype: Any, axis: int) -> None:
    shape = (3, 5, 37)
    parameters = [normal(rng, *shape[axis:], dtype=dtype) for _ in range(2)]
    agrees("LayerNormalization", [normal(rng, *shape, dtype=dtype), *parameters], outputs=3, axis=axis)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4097), (300, 64), (2, 128, 384), (0, 4)])
def test_layer_sizes(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    x = normal(rng, *shape) * 3 + 1
    agrees(
        "LayerNormalization", [x, normal(rng, shape[-1]), normal(rng, shape[-1])], outputs=3, shapes=True, epsilon=1e-6
    )
    agrees("LayerNormalization", [x, normal(rng, shape[-1])])


@pytest.mark.parametrize(
    ("scale", "bias"), [((5,), (4, 5)), ((4, 1), (5,)), ((), (1,)), ((3, 1, 1), (3, 4, 5)), ((4, 5), (3, 4, 1))]
)
def test_layer_broadcast_parameters(rng: np.random.Generator, scale: tuple[int, ...], bias: tuple[int, ...]) -> None:
    agrees("LayerNormalization", [normal(rng, 3, 4, 5), normal(rng, *scale), normal(rng, *bias)], axis=1)


def test_layer_of_a_large_mean(rng: np.random.Generator) -> None:
    """One pass over squares would lose every digit."""
    agrees("LayerNormalization", [normal(rng, 4, 1000) + 30, normal(rng, 1000), normal(rng, 1000)], outputs=3)


def test_layer_of_a_long_row(rng: np.random.Generator) -> None:
    agrees("LayerNormalization", [normal(rng, 2, 1 << 20) + 5, positive(rng, 1)], axis=1)


def test_layer_of_odd_numbers(rng: np.random.Generator) -> None:
    x = normal(rng, 6, 40)
    x[0, 3], x[1, 5], x[2, 7] = np.nan, np.inf, -np.inf
    x[3] = 7.0
    x[4] *= 1e18
    agrees("LayerNormalization", [x, positive(rng, 40), normal(rng, 40)], outputs=3)
    agrees("RMSNormalization", [x, positive(rng, 40)])
    agrees("LpNormalization", [x])


def test_layer_stashes_another_type(rng: np.random.Generator) -> None:
    x, scale = normal(rng, 3, 8, dtype=np.float16), normal(rng, 8, dtype=np.float16)
    agrees("LayerNormalization", [x, scale], outputs=3, stash_type=10)


@pytest.mark.parametrize(("dtype", "scale"), [*((d, d) for d in DTYPES), (np.float16, np.float32)])
def test_rms(rng: np.random.Generator, dtype: Any, scale: Any) -> None:
    agrees("RMSNormalization", [normal(rng, 3, 4, 65, dtype=dtype), normal(rng, 65, dtype=scale)])
    agrees(
        "SimplifiedLayerNormalization",
        [normal(rng, 7, 33, dtype=dtype), normal(rng, 33, dtype=scale)],
        outputs=2,
        axis=-1,
    )


@every_other(("dtype", [np.float32, np.float16]), ("skip", [(2, 5, 48), (1, 5, 48), (5, 48)]))
def test_skip(rng: np.random.Generator, dtype: Any, skip: tuple[int, ...]) -> None:
    x, s = normal(rng, 2, 5, 48, dtype=dtype), normal(rng, *skip, dtype=dtype)
    gamma, beta, bias = (normal(rng, 48, dtype=dtype) for _ in range(3))
    single = dtype is np.float32
    agrees(MS + "SkipLayerNormalization", [x, s, gamma, beta, bias], outputs=4, shapes=single, epsilon=1e-5)
    agrees(MS + "SkipLayerNormalization", [x, s, gamma], epsilon=1e-5)
    agrees(MS + "SkipSimplifiedLayerNormalization", [x, s, gamma, bias], outputs=4, epsilon=1e-5)


@pytest.mark.parametrize("integers", [np.int32, np.int64])
@pytest.mark.parametrize("full", [False, True])
def test_embed(rng: np.random.Generator, integers: Any, full: bool) -> None:
    ids, segments = rng.integers(0, 30, (3, 7)).astype(integers), rng.integers(0, 2, (3, 7)).astype(integers)
    word, position, segment, gamma, beta = (
        normal(rng, 30, 24),
        normal(rng, 9, 24),
        normal(rng, 2, 24),
        normal(rng, 24),
        normal(rng, 24),
    )
    mask, positions = (rng.integers(0, hi, (3, 7)).astype(integers) for hi in (2, 9))
    if full:
        inputs: list[Array | None] = [ids, segments, word, position, segment, gamma, beta, mask, positions]
    else:
        inputs = [ids, None, word, position, None, gamma, beta]
    agrees(MS + "EmbedLayerNormalization", inputs, outputs=3 if full else 2, epsilon=1e-6)


# -- instance, group, mean-variance, Lp -------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_instance_and_group(rng: np.random.Generator, dtype: Any) -> None:
    for shape in ((2, 6, 7, 9), (1, 4, 33)):
        x, scale, bias = (normal(rng, *s, dtype=dtype) for s in (shape, shape[1:2], shape[1:2]))
        agrees("InstanceNormalization", [x, scale, bias])
        agrees("GroupNormalization", [x, scale, bias], shapes=dtype is np.float32, num_groups=2, epsilon=1e-2)


def test_group_edges(rng: np.random.Generator) -> None:
    agrees("GroupNormalization", [normal(rng, 3, 6), normal(rng, 6), normal(rng, 6)], num_groups=3)
    agrees("GroupNormalization", [normal(rng, 3, 6, 5), normal(rng, 6), normal(rng, 6)], num_groups=6)
    agrees("GroupNormalization", [normal(rng, 1, 6, 1, 1), normal(rng, 6), normal(rng, 6)], num_groups=1)
    agrees("GroupNormalization", [normal(rng, 0, 6, 5), normal(rng, 6), normal(rng, 6)], num_groups=2)
    agrees("InstanceNormalization", [normal(rng, 2, 3, 1, 1), normal(rng, 3), normal(rng, 3)])


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((3, 4, 5, 6), None), ((3, 4, 5, 6), (1, 3)), ((3, 4, 5, 6), (0, 2)), ((3, 4, 5, 131), (1,)), ((2, 3, 4), (-1, 0)),
     ((3, 4), (0, 1)), ((1, 7, 3, 3), None), ((2, 3, 300), (0, 1))],
)  # fmt: skip
def test_mean_variance(rng: np.random.Generator, shape: tuple[int, ...], axes: tuple[int, ...] | None) -> None:
    attrs: dict[str, Any] = {} if axes is None else {"axes": axes}
    agrees("MeanVarianceNormalization", [normal(rng, *shape)], shapes=True, **attrs)


@every_other(("dtype", DTYPES), ("p", [1, 2]))
def test_lp(rng: np.random.Generator, dtype: Any, p: int) -> None:
    x = normal(rng, 3, 5, 70, dtype=dtype)
    x[1] = 0
    for axis in (-1, 1, 0):
        agrees("LpNormalization", [x], p=p, axis=axis)


# -- batch ------------------------------------------------------------------------------------------------------------
def batch_inputs(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.float32, parameters: Any = None
) -> list[Array | None]:
    kind, c = parameters or dtype, shape[1]
    return [normal(rng, *shape, dtype=dtype), positive(rng, c, dtype=kind), normal(rng, c, dtype=kind),
        normal(rng, c, dtype=kind),
            positive(rng, c, dtype=kind)]  # fmt: skip


@pytest.mark.parametrize(("dtype", "parameters"), [*((d, d) for d in DTYPES), (np.float16, np.float32)])
def test_batch(rng: np.random.Generator, dtype: Any, parameters: Any) -> None:
    for shape in ((2, 5, 7, 9), (1, 64, 130), (7, 300), (1, 1), (0, 3, 4)):
        inputs = batch_inputs(rng, shape, dtype, parameters)
        agrees("BatchNormalization", inputs, "norm_batch", shapes=dtype is np.float32, epsilon=1e-3)


@pytest.mark.parametrize("shape", [(2, 5, 7, 9), (1, 16, 33), (3, 20, 4, 4)])
def test_batch_blocked(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    layout = blocked(open_device("CPU").target.vector_bytes // 4)
    case = Case("BatchNormalization", batch_inputs(rng, shape), layouts=(layout, layout))
    assert not check(case, "opencl.norm_batch", configs=1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_batch_training(rng: np.random.Generator, dtype: Any) -> None:
    for shape in ((4, 3, 5, 2), (9, 6)):
        inputs = batch_inputs(rng, shape, dtype)
        agrees("BatchNormalization", inputs, "norm_batch", 3, training_mode=1, momentum=0.7)
    agrees("BatchNormalization", inputs, "norm_batch", training_mode=1)


# -- LRN --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_lrn(rng: np.random.Generator, dtype: Any) -> None:
    for shape in ((2, 7, 3, 4), (1, 3, 300), (2, 1, 5), (2, 9)):
        agrees("LRN", [normal(rng, *shape, dtype=dtype)], "lrn", size=3)
    agrees("LRN", [normal(rng, 2, 7, 3, 4, dtype=dtype)], "lrn", size=5, alpha=0.5, beta=0.6, bias=2.0)


def test_lrn_windows(rng: np.random.Generator) -> None:
    x = normal(rng, 1, 4, 6, 6)
    x[0, 1, 2, 3], x[0, 2, 0, 0] = np.nan, np.inf
    for size in (1, 2, 4, 30):
        agrees("LRN", [x], "lrn", shapes=True, size=size, alpha=1.0)
