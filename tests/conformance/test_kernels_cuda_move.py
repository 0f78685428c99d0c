"""Triton's kernels that only move elements, against the references, in its interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance.cuda_cases import Made
from tunewright.ir.graph import Fused
from tunewright.ir.types import NHWC, PLAIN
from tunewright.ops.internal.reorder import REORDER
from tunewright.testing.kernelcheck import Case, check

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tunewright.devices.cuda.device import CudaDevice
from tunewright.solvers.base import solvers

# The interpreter computes masked lanes too, with numpy, which warns of what becomes of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MADE = Made(np.float16)
RNG, normal = MADE.rng, MADE.normal
LAST = {"layouts": (NHWC, NHWC)}


def concat(axis: int, *shapes: tuple[int, ...], **more: Any) -> Case:
    along = frozenset(range(1, len(shapes))) if "layouts" in more else frozenset()
    return Case("Concat", [normal(*s) for s in shapes], {"axis": axis}, along=along, **more)


def split(axis: int, shape: tuple[int, ...], *sizes: int, **more: Any) -> Case:
    return Case("Split", [normal(*shape), np.array(sizes)], {"axis": axis}, len(sizes), frozenset({1}), **more)


def cut(x: np.ndarray, starts: Any, ends: Any, axes: Any = None, steps: Any = None, **more: Any) -> Case:
    given = [None if v is None else np.array(v) for v in (starts, ends, axes, steps)]
    return Case("Slice", [x, *given], constant=frozenset(i + 1 for i, v in enumerate(given) if v is not None), **more)


def pad(x: np.ndarray, pads: Any, value: Any = None, axes: Any = None, **more: Any) -> Case:
    given = [np.array(pads), value, None if axes is None else np.array(axes)]
    return Case("Pad", [x, *given], constant=frozenset(i + 1 for i, v in enumerate(given) if v is not None), **more)


def turned(perm: Any, *shape: int, **more: Any) -> Case:
    return Case("Transpose", [normal(*shape)], {"perm": perm}, **more)


MOVES = {
    "to channels last": Case(REORDER, [normal(2, 7, 5, 6)], {"layout": "nhwc"}, layouts=(PLAIN, NHWC)),
    "from channels last": Case(REORDER, [normal(2, 7, 5, 6)], {"layout": "plain"}, layouts=(NHWC, PLAIN)),
    "many channels": Case(REORDER, [normal(1, 70, 3, 40)], {"layout": "plain"}, layouts=(NHWC, PLAIN)),
    "few channels": Case(REORDER, [normal(1, 3, 9, 11)], {"layout": "nhwc"}, layouts=(PLAIN, NHWC)),
    "two axes": turned((1, 0), 37, 41),
    "heads": turned((0, 2, 1, 3), 2, 5, 3, 16),
    "keys": turned((0, 2, 3, 1), 2, 7, 3, 12),
    "boxes": turned((0, 1, 3, 4, 2), 1, 3, 9, 4, 5),
    "three": turned((2, 1, 0), 5, 6, 7),
    "turned, channels last": turned((0, 2, 3, 1), 2, 6, 5, 7, layouts=(NHWC, PLAIN)),
    "turned, bytes": Case("Transpose", [RNG.integers(0, 9, (6, 9), np.uint8)], {"perm": (1, 0)}),
    "turned, bools": Case("Transpose", [normal(6, 9) > 0], {"perm": (1, 0)}),
    "turned, with an activation": turned((0, 2, 1), 2, 9, 7, epilogue=(Fused("Sigmoid", (~0,)),)),
    "turned, with a residual": Case(
        "Transpose", [normal(2, 9, 7), normal(2, 7, 9)], {"perm": (0, 2, 1)},
        epilogue=(Fused("Add", (~0, 1)), Fused("Relu", (~1,))), operands=1,
    ),
    "side by side": concat(1, (2, 8, 3, 4), (2, 16, 3, 4), **LAST),
    "side by side, odd": concat(1, (2, 5, 3, 4), (2, 1, 3, 4), (2, 9, 3, 4), (2, 2, 3, 4), **LAST),
    "rows of channels last": concat(2, (2, 5, 3, 4), (2, 5, 1, 4), **LAST),
    "plain channels": concat(1, (2, 5, 3, 4), (2, 3, 3, 4)),
    "last axis": concat(-1, (3, 5), (3, 2), (3, 7)),
    "nothing among them": concat(0, (3, 5), (0, 5), (2, 5)),
    "joined, with an activation": concat(1, (1, 5, 3, 4), (1, 4, 3, 4), epilogue=(Fused("Relu", (~0,)),), **LAST),
    "thirds": split(1, (2, 15, 3, 4), 5, 5, 5, **LAST),
    "uneven": split(-1, (2, 3, 11), 2, 2, 7),
    "one of them": split(0, (5, 4), 5, 0),
    "channels": cut(normal(2, 12, 3, 4), [4], [9], [1], **LAST),
    "every other pixel": cut(normal(1, 6, 7, 8), [0, 1], [99, 99], [2, 3], [2, 2], **LAST),
    "backwards": cut(normal(4, 9), [-1], [-99], [1], [-2]),
    "from the end": cut(normal(4, 9), [-5, 0], [-1, 3], [1, 0]),
    "spread": Case("Expand", [normal(3, 1, 5), np.array([2, 3, 4, 5])], constant=frozenset({1})),
    "spread, channels last": Case(
        "Expand", [normal(1, 5, 1, 1), np.array([2, 5, 3, 4])], constant=frozenset({1}), **LAST
    ),
    "tiles": Case("Tile", [normal(2, 3, 4), np.array([1, 2, 3])], constant=frozenset({1})),
    "pixels": Case("DepthToSpace", [normal(2, 12, 3, 4)], {"blocksize": 2}),
    "pixels by columns": Case("DepthToSpace", [normal(1, 18, 3, 2)], {"blocksize": 3, "mode": "CRD"}, **LAST),
    "pixels, channels last": Case("DepthToSpace", [normal(2, 12, 3, 4)], {"blocksize": 2}, **LAST),
    "blocks": Case("SpaceToDepth", [normal(2, 3, 4, 6)], {"blocksize": 2}),
    "blocks, channels last": Case("SpaceToDepth", [normal(2, 3, 4, 6)], {"blocksize": 2}, **LAST),
    "shuffled": Case("org.openvinotoolkit::ShuffleChannels", [normal(2, 12, 3, 4)], {"axis": 1, "group": 3}, **LAST),
    "padded": pad(normal(2, 5, 3, 4), [0, 0, 1, 2, 0, 0, 1, 0]),
    "padded, channels last": pad(normal(2, 5, 3, 4), [0, 0, 1, 1, 0, 0, 1, 1], **LAST),
    "padded with a number": pad(normal(3, 4), [1, 0, 0, 2], np.float16(2.5).reshape(())),
    "padded and cut": pad(normal(3, 6, dtype=np.float32), [2, -1, -1, 3], np.float32(-1).reshape(())),
    "padded along some axes": pad(normal(3, 6), [1, 2], None, [1]),
    "padded integers": pad(np.arange(12).reshape(3, 4), [1, 1, 1, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_moves(name: str, device: CudaDevice) -> None:
    assert check(MOVES[name], "triton.move", configs=1, device=device) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", MOVES)
def test_moves_in_many_configs(name: str, device: CudaDevice) -> None:
    assert check(MOVES[name], "triton.move", configs=12, device=device) == []


def test_what_it_does_not_move(device: CudaDevice) -> None:
    (move,) = (s for s in solvers() if s.id == "triton.move")
    reflected = pad(normal(2, 5), [0, 1, 0, 1])
    problem = Case("Pad", reflected.inputs, {"mode": "reflect"}, constant=reflected.constant).problem()
    assert move.why_not(problem, device.target) == "pads with a constant"


def picked(op: str, *inputs: Any, outputs: int = 1, constant: tuple[int, ...] = (), **attrs: Any) -> Case:
    return Case(op, list(inputs), attrs, outputs, frozenset(constant))


TIES = np.array([[3, 1, 3, 2, 3, 0], [5, 5, 1, 1, 0, 5]], np.float32)
LIBRARY = {
    "first of the largest": picked("ArgMax", TIES, axis=1),
    "last of the smallest": picked("ArgMin", TIES, axis=-1, keepdims=0, select_last_index=1),
    "top": picked("TopK", TIES, np.array([4]), outputs=2, constant=(1,), axis=1),
    "bottom": picked("TopK", TIES, np.array([2]), outputs=2, constant=(1,), axis=0, largest=0),
    "sums": picked("CumSum", normal(3, 7, dtype=np.float32), np.array(1), constant=(1,)),
    "sums before, from the end": picked(
        "CumSum", np.arange(12).reshape(3, 4), np.array(0), constant=(1,), exclusive=1, reverse=1
    ),
    "elements": picked("GatherElements", normal(4, 5), np.array([[0, -1, 2], [3, 1, -4]]), axis=0),
    "above": picked("Trilu", normal(2, 4, 5), np.array(1), constant=(1,)),
    "below": picked("Trilu", normal(5, 4), upper=0),
    "mirrored": Case("Pad", pad(normal(2, 3, 4, 5), [0, 0, 2, 3, 0, 0, 1, 4]).inputs[:2], {"mode": "reflect"},
                     constant=frozenset({1})),
    "continued": Case("Pad", pad(normal(3, 5), [1, -1, 0, 2]).inputs[:2], {"mode": "edge"}, constant=frozenset({1})),
    "wrapped": Case("Pad", [*pad(normal(3, 5), [1, 2]).inputs[:2], None, np.array([-1])], {"mode": "wrap"},
                    constant=frozenset({1, 3})),
    "neighbours": picked("LRN", normal(2, 7, 3, 4), size=3, alpha=0.1, beta=0.6, bias=1.5),
    "neighbours, even": picked("LRN", normal(1, 6, 3, 4, dtype=np.float32), size=4, alpha=0.2),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARY)
def test_what_the_library_picks(name: str, device: CudaDevice) -> None:
    assert check(LIBRARY[name], "vendor.picking", configs=0, device=device) == []


def steps(op: str, x: np.ndarray, scale: Any, zero: Any = None, **more: Any) -> Case:
    given = [x, np.asarray(scale, np.float32), zero]
    layouts = {"layouts": more.pop("layouts")} if "layouts" in more else {}
    return Case(op, given, more, constant=frozenset(i for i in (1, 2) if given[i] is not None), **layouts)


BYTES = RNG.integers(-128, 128, (2, 5, 3, 4)).astype(np.int8)
HALVES = (np.arange(60).reshape(1, 5, 3, 4) - 20).astype(np.float32) / 4
QUANTISED = {
    "quantised": steps("QuantizeLinear", HALVES, 0.5, np.uint8(3).reshape(())),
    "quantised, signed": steps("QuantizeLinear", 99 * HALVES, 0.5, np.int8(-3).reshape(())),
    "quantised, by channel": steps(
        "QuantizeLinear", HALVES, [0.5, 1, 0.25, 3, 0.1], np.arange(5).astype(np.int8), layouts=(NHWC, NHWC)
    ),
    "quantised, halves": steps("QuantizeLinear", HALVES.astype(np.float16), 0.3),
    "dequantised": steps("DequantizeLinear", BYTES, 0.1, np.int8(7).reshape(())),
    "dequantised, by channel": steps("DequantizeLinear", BYTES, [0.5, 1, 0.25, 3, 0.1], layouts=(NHWC, NHWC)),
    "dequantised, last axis": steps("DequantizeLinear", BYTES, [0.5, 1, 0.25, 3], BYTES[0, 0, 0], axis=-1),
    "dequantised, sums": steps("DequantizeLinear", np.arange(9, dtype=np.int32) + (1 << 24), 0.01),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
def test_quantising(name: str, device: CudaDevice) -> None:
    assert check(QUANTISED[name], "triton.quantize", configs=0, device=device) == []
