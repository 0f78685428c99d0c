"""Samples of operators that move, select and create elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Samples, each, integers, ints, join, normal, over, scalar, uniform

_FAR = np.iinfo(np.int64).max


def _x(*shape: int) -> Any:
    return lambda rng: [normal(rng, *shape)]


SHAPING: dict[str, Samples] = {
    "Shape": each(_x(2, 3, 5), {}, {"start": 1}, {"end": -1}, {"start": -2, "end": 3}, {"start": 2, "end": 1}),
    "Size": join(each(_x(2, 3, 5)), each(_x())),
    "Identity": each(_x(2, 3)),
    "Reshape": join(
        over(((6, 4), (0, -1), (-1,), (4, 0, 2), (0, 3, 2, 2)), lambda rng, s: [normal(rng, 2, 3, 4), ints(*s)]),
        each(lambda rng: [normal(rng, 1), np.zeros(0, np.int64)]),
        each(lambda rng: [normal(rng, 0, 3), ints(3, 0)], {"allowzero": 1}),
    ),
    "Flatten": join(each(_x(2, 3, 4, 5), {}, {"axis": 0}, {"axis": -1}, {"axis": 4}), each(_x(), {"axis": 0})),
    "Squeeze": join(each(_x(1, 3, 1, 5)), over(((0,), (-2, 0)), lambda rng, a: [normal(rng, 1, 3, 1, 5), ints(*a)])),
    "Unsqueeze": over(((0,), (-1, 1), (2, 0)), lambda rng, a: [normal(rng, 3, 5), ints(*a)]),
    "Transpose": each(_x(2, 3, 4), {}, {"perm": (1, 2, 0)}, {"perm": (0, 2, 1)}),
    "DepthToSpace": each(_x(2, 12, 3, 5), {"blocksize": 2}, {"blocksize": 2, "mode": "CRD"}),
    "SpaceToDepth": each(_x(2, 3, 4, 6), {"blocksize": 2}),
}


def _slices(*cases: tuple[Any, ...]) -> Samples:
    return over(cases, lambda rng, c: [normal(rng, 5, 7, 4), *(None if v is None else ints(*v) for v in c)])


SLICING: dict[str, Samples] = {
    "Slice": _slices(
        ((1, 0), (4, 3)),
        ((0,), (_FAR,), (1,)),
        ((-3,), (-1,), (-2,)),
        ((-1,), (-_FAR,), (0,), (-1,)),
        ((6, 0), (0, 9), (1, 2), (-2, 3)),
        ((9,), (20,), (0,)),
    ),
    "Split": join(
        each(lambda rng: [normal(rng, 7, 4)], {"axis": 0, "num_outputs": 3}, outputs=3),
        each(lambda rng: [normal(rng, 6, 4), ints(1, 3)], {"axis": -1}, outputs=2),
        each(lambda rng: [normal(rng, 6, 4), ints(0, 6)], {}, outputs=2),
    ),
    "Concat": join(
        each(lambda rng: [normal(rng, 2, k, 3) for k in (1, 4, 2)], {"axis": 1}),
        each(lambda rng: [integers(rng, 0, 9, 2, 3), integers(rng, 0, 9, 2, 3)], {"axis": -1}),
        each(_x(2, 3), {"axis": 0}),
    ),
    "Pad": join(
        each(
            lambda rng: [normal(rng, 3, 4), ints(0, 2, 1, 1)], {}, *({"mode": m} for m in ("reflect", "edge", "wrap"))
        ),
        each(lambda rng: [normal(rng, 3, 4), ints(1, 0, 2, 3), scalar(7.5, np.float32)]),
        each(lambda rng: [normal(rng, 3, 4, 5), ints(1, 2), scalar(1.5, np.float32), ints(-1)]),
        each(lambda rng: [normal(rng, 5, 6), ints(-1, 1, 2, -2)]),
    ),
    "Tile": each(lambda rng: [normal(rng, 2, 3), ints(3, 2)]),
    "Expand": over(((3, 4), (2, 1, 6), (1,), (2, 3, 1)), lambda rng, s: [normal(rng, 3, 1), ints(*s)]),
}


def _sparse(reduction: str) -> Samples:
    return each(
        lambda rng: [
            normal(rng, 5, 4),
            np.array([[0, 2, 1], [4, -1, 3]]) if reduction == "none" else integers(rng, -5, 5, 2, 3),
            normal(rng, 2, 3),
        ],
        {"reduction": reduction},
    )


INDEXING: dict[str, Samples] = {
    "Gather": join(
        each(lambda rng: [normal(rng, 5, 4, 3), integers(rng, -4, 4, 2, 3)], {"axis": 1}),
        each(lambda rng: [normal(rng, 5, 4), scalar(2)]),
        each(lambda rng: [integers(rng, 0, 9, 6), integers(rng, -6, 6, 2, 2, dtype=np.int32)]),
    ),
    "GatherElements": join(
        each(lambda rng: [normal(rng, 5, 4), integers(rng, -5, 5, 2, 4)]),
        each(lambda rng: [normal(rng, 5, 4), integers(rng, -4, 4, 3, 2)], {"axis": -1}),
    ),
    "GatherND": join(
        each(lambda rng: [normal(rng, 5, 4, 3), integers(rng, -4, 4, 2, 3, 2)]),
        each(lambda rng: [normal(rng, 2, 4, 3), integers(rng, -3, 3, 2, 2)], {"batch_dims": 1}),
        each(lambda rng: [normal(rng, 2, 4, 3), integers(rng, -4, 4, 2, 5, 1)], {"batch_dims": 1}),
    ),
    "ScatterElements": join(
        *(_sparse(r) for r in ("none", "add", "mul", "max", "min")),
        each(lambda rng: [normal(rng, 3, 6), np.array([[1, 3, -1]]), normal(rng, 1, 3)], {"axis": 1}),
    ),
    "ScatterND": join(
        each(lambda rng: [normal(rng, 5, 4), ints(4, 0, -2).reshape(3, 1), normal(rng, 3, 4)]),
        *(
            each(lambda rng: [normal(rng, 5, 4), integers(rng, -4, 4, 6, 2), normal(rng, 6)], {"reduction": r})
            for r in ("add", "mul", "max", "min")
        ),
    ),
    "TensorScatter": join(
        each(lambda rng: [normal(rng, 3, 2, 7, 4), normal(rng, 3, 2, 2, 4), ints(0, 5, 3)]),
        each(lambda rng: [normal(rng, 3, 7, 4), normal(rng, 3, 3, 4), ints(6, 0, 19)], {"mode": "circular"}),
        each(lambda rng: [normal(rng, 2, 5, 4), normal(rng, 2, 5, 1)], {"axis": -1}),
        each(lambda rng: [normal(rng, 2, 5, 4), normal(rng, 2, 5, 4)], {"axis": 1, "mode": "circular"}),
    ),
    "TopK": join(
        each(lambda rng: [normal(rng, 3, 11), ints(4)], {}, {"largest": 0}, outputs=2),
        each(lambda rng: [integers(rng, 0, 5, 7, 3), ints(4)], {"axis": 0}, outputs=2),
        each(lambda rng: [normal(rng, 2, 5003), ints(17)], {}, {"largest": 0}, outputs=2),
    ),
    "OneHot": join(
        each(
            lambda rng: [integers(rng, -6, 9, 2, 3), scalar(6), np.array([0.25, 2.5], np.float32)],
            {},
            {"axis": 1},
            {"axis": 0},
        ),
        each(lambda rng: [integers(rng, 0, 4, 5), scalar(4), ints(0, 1)]),
    ),
    "NonZero": each(lambda rng: [integers(rng, 0, 2, 3, 4, dtype=np.float32)]),
    "Compress": join(
        each(lambda rng: [normal(rng, 4, 3), np.array([True, False, True])], {"axis": 0}, {"axis": -1}),
        each(lambda rng: [normal(rng, 2, 3), np.array([False, True, True, False, True])]),
    ),
    "Unique": join(
        each(lambda rng: [integers(rng, 0, 4, 3, 5, dtype=np.float32)], {}, {"sorted": 0}, outputs=4),
        each(lambda rng: [integers(rng, 0, 2, 6, 2)], {"axis": 0}, outputs=4),
    ),
    "ReverseSequence": join(
        each(lambda rng: [normal(rng, 5, 3, 2), ints(5, 1, 3)]),
        each(lambda rng: [normal(rng, 3, 5), ints(5, 2, 3)], {"time_axis": 1, "batch_axis": 0}),
    ),
}

GENERATE: dict[str, Samples] = {
    "ConstantOfShape": join(
        each(lambda rng: [ints(2, 0, 3)]),
        each(lambda rng: [ints(2, 3)], {"value": np.array([7], np.int32)}),
        each(lambda rng: [np.zeros(0, np.int64)]),
    ),
    "Range": join(
        over(((2, 11, 3), (10, 4, -2), (3, 3, 1), (5, 0, 1)), lambda rng, v: [scalar(t) for t in v]),
        each(lambda rng: [scalar(t, np.float32) for t in (1.0, 5.2, 0.7)]),
    ),
    "EyeLike": each(lambda rng: [integers(rng, 0, 9, 3, 5, dtype=np.int32)], {}, {"k": 1, "dtype": 1}, {"k": -2}),
    "Trilu": join(
        each(_x(2, 4, 5), {}, {"upper": 0}),
        over((-2, 1, 9), lambda rng, k: [normal(rng, 4, 5), scalar(k)], {"upper": 0}, {"upper": 1}),
    ),
}


def _boxes(rng: np.random.Generator) -> list[Any]:
    low = uniform(rng, 0, 8, 2, 40, 2)
    return [np.concatenate([low, low + uniform(rng, 1, 4, 2, 40, 2)], -1), uniform(rng, 0, 1, 2, 3, 40)]


DETECTION: dict[str, Samples] = {
    "NonMaxSuppression": join(
        each(
            lambda rng: [*_boxes(rng), ints(6), np.array([0.4], np.float32), np.array([0.3], np.float32)],
            {},
            {"center_point_box": 1},
        ),
        each(lambda rng: [*_boxes(rng), ints(50), np.array([0.2], np.float32)]),
    ),
}
