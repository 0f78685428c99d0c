"""Sliding windows of convolutions and poolings: padding, output size, strided views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.symbolic import WHOLE
from ..ir.types import Dim
from .base import Array, Attrs
from .onnx.tensors.slicing import pad

#: More padding indicates a broken or hostile model. It would take excessive memory and time.
MOST_PADDING = 1 << 16

AUTO_PAD = ("NOTSET", "", "VALID", "SAME_UPPER", "SAME_LOWER")


@dataclass(frozen=True)
class Windows:
    """The geometry of windows: one number per spatial axis. ``tail``: padding at the end, without that of ceiling."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    head: tuple[int, ...]
    tail: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, ...]:
        """Number of input elements from the first to the last tap."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def pads(self, spatial: Sequence[int]) -> list[tuple[int, int]]:
        """Padding with which every window reads inside. A negative number drops elements that no window reads."""
        pairs = []
        for k, size in enumerate(spatial):
            reach = (self.output[k] - 1) * self.strides[k] + self.extent[k]
            pairs.append((self.head[k], reach - size - self.head[k]))
        return pairs

    @property
    def trivial(self) -> bool:
        """Whether there is one tap and no padding. Windows are then the (strided) elements themselves."""
        return all(k == 1 for k in self.kernel) and not any(self.head) and not any(self.tail)


def spread(attrs: Attrs, key: str, rank: int, least: int = 1) -> tuple[int, ...]:
    """An attribute with one number per spatial axis. ``least`` is its minimum, and its value where it is absent."""
    found = attrs.get(key)
    if not found:
        return (least,) * rank
    if len(found) != rank:
        raise ValueError(f"{key} {list(found)} does not fit {rank} spatial axes")
    if min(found) < least:
        raise ValueError(f"{key} {list(found)} must be at least {least}")
    return tuple(found)


def all_pads(attrs: Attrs, rank: int) -> tuple[int, ...]:
    """The padding: heads of all axes, then tails of all axes."""
    found = attrs.get("pads")
    if not found:
        return (0,) * (2 * rank)
    if len(found) != 2 * rank:
        raise ValueError(f"pads {list(found)} does not fit {rank} spatial axes")
    if not all(-MOST_PADDING <= p <= MOST_PADDING for p in found):
        raise ValueError(f"pads {list(found)} go beyond {MOST_PADDING}")
    return tuple(found)


def windows(spatial: Sequence[int], kernel: Sequence[int], attrs: Attrs) -> Windows:
    """The windows over an input, from the attributes ``strides``, ``dilations``, ``pads``, ``auto_pad`` and
    ``ceil_mode``."""
    rank = len(spatial)
    if len(kernel) != rank:
        raise ValueError(f"kernel {list(kernel)} does not fit {rank} spatial axes")
    if min(kernel, default=1) < 1:
        raise ValueError(f"kernel {list(kernel)} must be at least 1")
    strides, dilations = spread(attrs, "strides", rank), spread(attrs, "dilations", rank)
    auto, pads, ceil = attrs.get("auto_pad", "NOTSET"), all_pads(attrs, rank), bool(attrs.get("ceil_mode", 0))
    if auto not in AUTO_PAD:
        raise ValueError(f"auto_pad {auto!r} is not one of {', '.join(a for a in AUTO_PAD if a)}")
    head, tail, output = [], [], []
    for k in range(rank):
        size, stride, extent = spatial[k], strides[k], (kernel[k] - 1) * dilations[k] + 1
        before, after = (0, 0) if auto == "VALID" else (pads[k], pads[k + rank])
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            out = -(-size // stride)
            needed = max(0, (out - 1) * stride + extent - size)
            before = needed // 2 if auto == "SAME_UPPER" else needed - needed // 2
            after = needed - before
        else:
            room = size + before + after - extent
            if room < 0:
                raise ValueError(f"the window of {extent} is larger than the padded input of {size + before + after}")
            out = (-(-room // stride) if ceil else room // stride) + 1
            if ceil and (out - 1) * stride >= size + before:
                out -= 1  # the last window must start inside the input or its leading padding
        head.append(before)
        tail.append(after)
        output.append(out)
    return Windows(tuple(kernel), strides, dilations, tuple(head), tuple(tail), tuple(output))


def output_dims(spatial: Sequence[Dim], kernel: Sequence[Dim], attrs: Attrs) -> tuple[Dim, ...]:
    """The output size per spatial axis; None where it is open."""
    rank = len(spatial)
    result: list[Dim] = []
    for k in range(rank):
        size, taps = spatial[k], kernel[k]
        if not isinstance(size, WHOLE) or not isinstance(taps, WHOLE):
            # Checked with a size that fits, so that a bad attribute raises now. The result stays open.
            result.append(_open_dim(size, taps, attrs, rank, k))
            continue
        result.append(windows([size], [taps], one_axis(attrs, rank, k)).output[0])
    return tuple(result)


def _open_dim(size: Dim, taps: Dim, attrs: Attrs, rank: int, k: int) -> Dim:
    one = one_axis(attrs, rank, k)
    same = one.get("auto_pad") in ("SAME_UPPER", "SAME_LOWER")
    if one["strides"][0] != 1 or not isinstance(taps, WHOLE):
        return size if same and one["strides"][0] == 1 else None
    extent = (taps - 1) * one["dilations"][0] + 1
    pads = (0, 0) if one.get("auto_pad") == "VALID" else one["pads"]
    return size if same or sum(pads) == extent - 1 else None


def one_axis(attrs: Attrs, rank: int, k: int) -> dict[str, Any]:
    """The attributes for a single spatial axis."""
    pads = all_pads(attrs, rank)
    return {
        "strides": (spread(attrs, "strides", rank)[k],),
        "dilations": (spread(attrs, "dilations", rank)[k],),
        "pads": (pads[k], pads[k + rank]),
        "auto_pad": attrs.get("auto_pad", "NOTSET"),
        "ceil_mode": attrs.get("ceil_mode", 0),
    }


def padded(x: Array, w: Windows, fill: float = 0) -> Array:
    """``x`` [N, C, *spatial] with the padding that its windows read."""
    pairs = w.pads(x.shape[2:])
    if not any(a or b for a, b in pairs):
        return x
    return pad(x, [(0, 0), (0, 0), *pairs], fill=fill)


def window_view(x: Array, w: Windows) -> Array:
    """[N, C, *kernel, *output] over a padded input, without a copy."""
    n, c, *inner = x.strides
    return np.lib.stride_tricks.as_strided(
        x,
        (*x.shape[:2], *w.kernel, *w.output),
        (
            n,
            c,
            *(s * d for s, d in zip(inner, w.dilations, strict=True)),
            *(s * t for s, t in zip(inner, w.strides, strict=True)),
        ),
        writeable=False,
    )


def taps(w: Windows) -> list[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """(position in the kernel, the elements under it for every window) for each tap, in row-major order."""
    found = []
    for flat in range(math.prod(w.kernel)):
        at = tuple(int(v) for v in np.unravel_index(flat, w.kernel))
        found.append(
            (
                at,
                tuple(
                    slice(p * d, p * d + (o - 1) * s + 1, s)
                    for p, d, o, s in zip(at, w.dilations, w.output, w.strides, strict=True)
                ),
            )
        )
    return found
