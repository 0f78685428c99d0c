"""Kernels that work in blocks, or go into them and out of them, so that no Reorder is needed beside them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tunewright.ir.types import PLAIN, DType, Layout, TensorType, blocked
from tunewright.ops.internal.reorder import from_plain, moves_nothing
from tunewright.plugins.single import open_device
from tunewright.testing.kernelcheck import Case, check

BLOCK = blocked(open_device("CPU").target.vector_bytes // 4)
B = BLOCK.block


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(dtype)


def agrees(case: Case, family: str) -> None:
    """The kernel that takes shapes as arguments, as it is by default; others have the same text."""
    assert not check(case, f"opencl.{family}", configs=0, specialised=False)


@pytest.mark.parametrize("order", [o for o in itertools.permutations(range(4)) if o != (0, 1, 2, 3)], ids=str)
def test_transpose(rng: np.random.Generator, order: tuple[int, ...]) -> None:
    x = normal(rng, 2, 2 * B, 3 * B, B)
    made = [x.shape[k] for k in order]
    for layouts in ((BLOCK, PLAIN), (PLAIN, BLOCK), (BLOCK, BLOCK)):
        if layouts[1] == BLOCK and made[1] % B:
            continue
        agrees(Case("Transpose", [x], {"perm": order}, layouts=layouts), "transpose")


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int8])
def test_transpose_of_other_types_and_ranks(rng: np.random.Generator, dtype: Any) -> None:
    for shape, order in [((3, B, 5), (2, 0, 1)), ((1, 2 * B, 1, 21), (0, 2, 3, 1)), ((2, B, 3, 4, 5), (4, 1, 0, 3, 2))]:
        case = Case("Transpose", [normal(rng, *shape).astype(dtype)], {"perm": order}, layouts=(BLOCK, PLAIN))
        agrees(case, "transpose")
    case = Case("Transpose", [normal(rng, 3, 5, B).astype(dtype)], {"perm": (0, 2, 1)}, layouts=(PLAIN, BLOCK))
    agrees(case, "transpose")


def test_transpose_needs_whole_blocks(rng: np.random.Generator) -> None:
    case = Case("Transpose", [normal(rng, 1, B + 1, 4)], {"perm": (0, 2, 1)}, layouts=(BLOCK, PLAIN))
    assert "not full" in check(case, "opencl.transpose")[0]


def test_views_of_the_same_pixels(rng: np.random.Generator) -> None:
    x = normal(rng, 2, B + 3, 1, 6)
    for op, shape, attrs in [("Squeeze", (2,), {}), ("Unsqueeze", (2,), {}), ("Reshape", (2, B + 3, 2, 3), {})]:
        agrees(Case(op, [x, np.array(shape, np.int64)], attrs, layouts=(BLOCK, BLOCK)), "view")
    other = Case("Reshape", [x, np.array((2, 3, 2, B + 3), np.int64)], layouts=(BLOCK, BLOCK))
    assert "under another shape" in check(other, "opencl.view")[0]


@pytest.mark.parametrize("sizes", [(B, B), (2 * B, B, 3), (B, 3 * B, B, 2 * B, B, B, B, B, B, 1)], ids=str)
def test_split_of_channels(rng: np.random.Generator, sizes: tuple[int, ...]) -> None:
    inputs = [normal(rng, 2, sum(sizes), 3, 5), np.array(sizes, np.int64)]
    case = Case("Split", inputs, {"axis": 1}, len(sizes), layouts=(BLOCK, BLOCK))
    agrees(case, "split")


def test_split_of_pixels_and_of_what_is_uneven(rng: np.random.Generator) -> None:
    inputs = [normal(rng, 2, B + 3, 6, 5), np.array((4, 2), np.int64)]
    assert not check(Case("Split", inputs, {"axis": 2}, 2, layouts=(BLOCK, BLOCK)), "opencl.split", configs=1)
    inputs = [normal(rng, 1, 8 + B, 2), np.array((3, B + 5), np.int64)]
    uneven = Case("Split", inputs, {"axis": 1}, 2, layouts=(BLOCK, BLOCK))
    assert "do not end with a block" in check(uneven, "opencl.split")[0]


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_a_convolution_of_few_results_stays_in_blocks(rng: np.random.Generator, channels: int) -> None:
    for kernel, pads in ((1, 0), (3, 1)):
        inputs = [
            normal(rng, 2, 2 * B + 1, 6, 7),
            normal(rng, channels, 2 * B + 1, kernel, kernel),
            normal(rng, channels),
        ]
        attrs = {"pads": [pads] * 4}
        case = Case("Conv", inputs, attrs, constant=frozenset({1, 2}), layouts=(BLOCK, BLOCK))
        agrees(case, "conv_blocked")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("channels", [B, 3 * B, B + 3, 2])
@pytest.mark.parametrize("pixels", [(1, 1), (1,), (1, 2)], ids=str)
def test_a_reorder_that_moves_nothing_is_told(
    rng: np.random.Generator, batch: int, channels: int, pixels: tuple[int, ...]
) -> None:
    array = normal(rng, batch, channels, *pixels)
    plain = TensorType.of(array)

    def bytes_of(layout: Layout) -> bytes:
        return bytes(from_plain(array, plain.with_layout(layout)).tobytes())

    there = plain.with_layout(BLOCK)
    assert there.dtype is DType.FLOAT32
    if moves_nothing(there, plain):
        assert bytes_of(BLOCK).startswith(bytes_of(PLAIN))
    if moves_nothing(plain, there):
        assert bytes_of(BLOCK) == bytes_of(PLAIN)
    assert moves_nothing(there, plain) == (pixels != (1, 2) and (batch == 1 or channels % B == 0))
    assert moves_nothing(plain, there) == (pixels != (1, 2) and channels % B == 0)
