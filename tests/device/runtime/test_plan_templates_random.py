"""Random networks over sounds and pyramids of open sizes: plans for classes compute what plans for each shape do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from device.runtime.test_plan_templates import FLOAT, SHORT, WHOLE, Build, compare
from native.harness import native

pytestmark = native


def sound(seed: int, steps: int = 6) -> bytes:
    """Convolutions, pools, gates, transposed convolutions and recurrent layers along a time of open length."""
    b, width = Build(seed), 8
    x = b.add("Conv", "x", b.weight(width, 3, 5), b.weight(width), strides=[int(b.rng.integers(1, 4))], pads=[2, 2])
    for _ in range(steps):
        kind = int(b.rng.integers(9))
        if kind < 2:
            apart = int(b.rng.choice([1, 2, 3]))
            x = b.add("Conv", x, b.weight(width, width, 3), dilations=[apart], pads=[apart] * 2)
        elif kind == 2:
            x = b.add("Conv", x, b.weight(width, 1, 4), group=width, pads=[3, 0])
        elif kind == 3:
            both = b.add("Conv", x, b.weight(2 * width, width, 1))
            first, last = b.add("Split", both, b.ints(width, width), outputs=2, axis=1)
            x = b.add("Mul", first, b.add("Sigmoid", last))
        elif kind == 4:
            x = b.add("ConvTranspose", x, b.weight(width, width, 4), strides=[2], pads=[1, 1])
            x = b.add("AveragePool", x, kernel_shape=[3], strides=[2], pads=[1, 1])
        elif kind == 5:
            pooled = b.add("MaxPool", x, kernel_shape=[2], strides=[2], pads=[0, 1])
            wanted = b.shape(b.size(x, 0), width, b.size(x, 2))
            x = b.add("Add", x, b.add("Resize", pooled, "", "", wanted, mode=str(b.rng.choice(["nearest", "linear"]))))
        elif kind == 6:
            turned = b.add("Transpose", x, perm=[2, 0, 1])
            weights = b.weight(1, 12, width), b.weight(1, 12, 4)
            made = b.add("GRU", turned, *weights, outputs=2, hidden_size=4, linear_before_reset=1)[0]
            flat = b.add("Transpose", b.add("Squeeze", made, b.ints(1)), perm=[1, 2, 0])
            x = b.add("Concat", flat, b.add("Slice", x, b.ints(4), b.ints(width), b.ints(1)), axis=1)
        elif kind == 7:
            x = b.add("InstanceNormalization", x, b.weight(width), b.weight(width))
        else:
            before, mode = b.add("Slice", x, b.ints(0), b.ints(-1), b.ints(2)), str(b.rng.choice(["constant", "edge"]))
            x = b.add("Add", x, b.add("Pad", before, b.ints(0, 0, 1, 0, 0, 0), mode=mode))
    return b.model({"x": (FLOAT, ["batch", 3, "n"])}, b.add("Identity", x))


def pyramid(seed: int, levels: int = 3) -> bytes:
    """A picture gets smaller, and larger again: each level becomes as large as the one that it is joined with."""
    b = Build(seed)
    x, width, levels_of = "x", 4, list[str]()
    for _ in range(levels):
        x = b.add("Relu", b.add("Conv", x, b.weight(8, width, 3, 3), b.weight(8), pads=[1] * 4))
        levels_of.append(x)
        width = 8
        kind = int(b.rng.integers(3))
        if kind == 0:
            x = b.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
        elif kind == 1:
            x = b.add("Conv", x, b.weight(8, 8, 3, 3), strides=[2, 2], pads=[1] * 4)
        else:
            x = b.add("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)
    for other in reversed(levels_of):
        if b.rng.integers(2):
            x = b.add("ConvTranspose", x, b.weight(8, 8, 2, 2), strides=[2, 2])
        mode = str(b.rng.choice(["nearest", "linear", "cubic"]))
        way = str(b.rng.choice(["half_pixel", "align_corners", "asymmetric"]))
        wanted = b.shape(b.size(x, 0), 8, b.size(other, 2), b.size(other, 3))
        x = b.add("Resize", x, "", "", wanted, mode=mode, coordinate_transformation_mode=way)
        if b.rng.integers(2):
            x = b.add("Add", x, other)
        else:
            x = b.add("Conv", b.add("Concat", x, other, axis=1), b.weight(8, 16, 1, 1))
    if b.rng.integers(2):
        x = b.add("Transpose", b.add("Reshape", x, b.shape(b.size(x, 0), 8, -1)), perm=[0, 2, 1])
        x = b.add("Softmax", x, axis=-1)
    return b.model({"x": (FLOAT, ["batch", 4, "h", "w"])}, b.add("Identity", x))


def sounds(rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
    return [(int(rng.choice([1, 2])), 3, int(rng.integers(30, 200))) for _ in range(count)]


def pyramids(rng: np.random.Generator, count: int) -> list[tuple[int, ...]]:
    return [(1, 4, int(rng.integers(20, 60)), int(rng.integers(20, 90))) for _ in range(count)]


@pytest.mark.parametrize("seed", [*SHORT, *WHOLE])
@pytest.mark.parametrize(("make", "shapes", "most"), [(sound, sounds, 4), (pyramid, pyramids, 2)])
def test_random_networks(make: Callable[[int], bytes], shapes: Any, most: int, seed: int) -> None:
    compare(make(seed), shapes(np.random.default_rng(seed), 8 if seed in SHORT else 20), most)
