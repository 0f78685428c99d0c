"""Operations that are one copy with other strides: Slice, Expand, Tile, DepthToSpace, SpaceToDepth and similar ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tunewright.devices.base import Target
from tunewright.ir.types import PLAIN
from tunewright.ops import shapes
from tunewright.ops.onnx.tensors import slicing
from tunewright.ops.openvino import common, movement
from tunewright.solvers.base import Missing, Problem, tensor

from ..source.base import both, layout_of
from ..source.element_words import word, words
from ..source.emit import In, Out
from ..source.strided_access import Access, StridedMove
from .move import MoveLaunch, MoveSolver

#: Returns source and target of the copy, of equal sizes; its arguments are the whole input and the whole output.
Accesses: TypeAlias = Callable[[Problem, Access, Access], tuple[Access, Access]]


def _ints(problem: Problem, i: int) -> list[int] | None:
    found = problem.value(i)
    return None if found is None else [shapes.whole(v) for v in found.reshape(-1)]


def _taken(problem: Problem) -> list[tuple[int, int, int]]:
    """For each axis, the first index that a Slice takes, the number of indices, and the step."""
    dims = tensor(problem.inputs[0]).dims
    starts, ends = _ints(problem, 1) or [], _ints(problem, 2) or []
    axes, steps = _ints(problem, 3), _ints(problem, 4) or [1] * len(starts)
    chosen = range(len(starts)) if axes is None else shapes.axes_of(axes, len(dims))
    taken = [(0, d, 1) for d in dims]
    for start, end, axis, step in zip(starts, ends, chosen, steps, strict=True):
        first, _ = slicing.limits(start, end, step, dims[axis])
        taken[axis] = first, slicing.slice_length(start, end, step, dims[axis]), step
    return taken


def _slice(problem: Problem, x: Access, y: Access) -> tuple[Access, Access]:
    block = layout_of(problem.inputs[0]).block
    for axis, (first, count, step) in enumerate(_taken(problem)):
        if axis == 1 and block:
            first, count = first // block, -(-(first + count) // block) - first // block
        x = x.cut(axis, first, count, step)
    return x, y


def _expand(problem: Problem, x: Access, y: Access) -> tuple[Access, Access]:
    return x.broadcast(y.dims), y


def _tile(problem: Problem, x: Access, y: Access) -> tuple[Access, Access]:
    """Each axis becomes two: the number of the copy, and the index inside it."""
    x = x.broadcast((1,) * (len(y.dims) - len(x.dims)) + x.dims)
    dims = x.dims
    for axis in reversed(range(len(dims))):
        times = y.dims[axis] // dims[axis] if dims[axis] else 0
        x, y = x.repeat(axis, times), y.split(axis, (times, dims[axis]))
    return x, y


def _depth_to_space(problem: Problem, x: Access, y: Access) -> tuple[Access, Access]:
    b, c = int(problem.attrs["blocksize"]), y.dims[1]
    if problem.attrs.get("mode", "DCR") == "CRD":
        x = x.split(1, (c, b, b)).permute((0, 1, 4, 2, 5, 3))
    else:
        x = x.split(1, (b, b, c)).permute((0, 3, 4, 1, 5, 2))
    return x, _pixels_split(y, b)


def _space_to_depth(problem: Problem, x: Access, y: Access) -> tuple[Access, Access]:
    b, c = int(problem.attrs["blocksize"]), x.dims[1]
    column_first = problem.attrs.get("mode", "DCR") == "CRD"
    order = (0, 1, 3, 5, 2, 4) if column_first else (0, 3, 5, 1, 2, 4)
    return _pixels_split(x, b).permute(order), y.split(1, (c, b, b) if column_first else (b, b, c))


def _pixels_split(whole: Access, b: int) -> Access:
    """The access of N, C, H, W as N, C, H/b, b, W/b, b."""
    height, width = whole.dims[2:]
    return whole.split(3, (width // b, b)).split(2, (height // b, b))


def _crop(problem: Problem, x: Access, y: Access) -> tuple[Access, Access]:
    like = problem.input(1)
    window = movement.crop_window(problem.attrs, x.dims, None if like is None else tensor(like).dims)
    for axis, (start, _) in enumerate(window):
        x = x.cut(axis, start, y.dims[axis])
    return x, y


def _shuffle_channels(problem: Problem, x: Access, y: Access) -> tuple[Access, Access]:
    axis, group = shapes.axis_of(int(problem.attrs.get("axis", 1)), len(x.dims)), int(problem.attrs.get("group", 1))
    each = x.dims[axis] // group
    order = list(range(len(x.dims) + 1))
    order[axis : axis + 2] = [axis + 1, axis]
    return x.split(axis, (group, each)).permute(order), y.split(axis, (each, group))


def _reorg_yolo(problem: Problem, x: Access, y: Access) -> tuple[Access, Access]:
    batch, channels, height, width = x.dims
    stride = height // y.dims[2]
    inner = channels // (stride * stride)
    whole = Access.of((batch, inner, height, stride, width, stride)).permute((0, 3, 5, 1, 2, 4))
    return whole, Access.of(whole.dims)


_OPS: dict[str, Accesses] = {
    "Slice": _slice,
    "Expand": _expand,
    "Tile": _tile,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    common.name("Crop"): _crop,
    common.name("Tile"): _tile,
    common.name("ShuffleChannels"): _shuffle_channels,
    common.name("ReorgYolo"): _reorg_yolo,
}


def _blocks(problem: Problem) -> str | None:
    """Why layouts that are not plain cannot be served, else None."""
    x, y = tensor(problem.inputs[0]), tensor(problem.outputs[0])
    if x.layout == y.layout == PLAIN:
        return None
    if x.layout != y.layout or problem.op != "Slice":
        return f"{problem.op} from {x.layout} to {y.layout}"
    if not x.is_static:
        return None
    first, count, step = _taken(problem)[1]
    if step != 1 or first % x.layout.block:
        return f"the channels {first}:{first + count * step}:{step} do not begin with a block"
    return None


class Strided(MoveSolver):
    """In the blocked layout, takes only slices that begin with a block."""

    family = "strided"
    ops = frozenset(_OPS)
    layouts = frozenset({"plain", "blocked"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.op == "Slice":
            for i in range(1, 5):
                if problem.input(i) is not None and problem.value(i) is None:
                    return Missing(f"input {i}, which says what to cut out, is not constant")
        return _blocks(problem) or super().refuse(problem, target)

    def copies(self, problem: Problem) -> list[MoveLaunch]:
        x, y = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        if not x.size or not y.size:
            return []
        source, target = _OPS[problem.op](problem, Access.of(x.physical), Access.of(y.physical))
        return [MoveLaunch(StridedMove.between(source, target, words(x.dtype)), In(0), Out(), word(x.dtype))]


SOLVERS = both(Strided)
