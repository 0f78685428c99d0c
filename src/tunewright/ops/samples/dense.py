"""Samples of convolutions, poolings, products, normalisations and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .base import Rng, Samples, each, integers, ints, join, normal, over, scalar, uniform


def _conv(
    x: Sequence[int], w: Sequence[int], *attrs: dict[str, Any], bias: bool = True, dtype: Any = np.float32
) -> Samples:
    def inputs(rng: Rng) -> list[Any]:
        found = [normal(rng, *x, dtype=dtype), normal(rng, *w, dtype=dtype)]
        return [*found, normal(rng, w[0], dtype=dtype)] if bias else found

    return each(inputs, *attrs)


def _deconv(x: Sequence[int], w: Sequence[int], *attrs: dict[str, Any], bias: int = 0) -> Samples:
    def inputs(rng: Rng) -> list[Any]:
        found = [normal(rng, *x), normal(rng, *w)]
        return [*found, normal(rng, bias)] if bias else found

    return each(inputs, *attrs)


CONV: dict[str, Samples] = {
    "Conv": join(
        _conv((2, 3, 9, 11), (5, 3, 3, 3), {}, {"pads": (1, 1, 1, 1)}, {"pads": (0, 1, 2, 3), "strides": (2, 3)}),
        _conv((1, 3, 9, 11), (4, 3, 3, 2), {"dilations": (2, 3)}, {"auto_pad": "SAME_UPPER", "strides": (2, 2)}),
        _conv((1, 3, 9, 10), (4, 3, 4, 2), {"auto_pad": "SAME_LOWER", "strides": (2, 3)}, {"auto_pad": "VALID"}),
        _conv((2, 6, 7, 5), (4, 6, 1, 1), {}, {"strides": (2, 2)}, {"pads": (1, 0, 0, 1)}, bias=False),
        _conv((2, 6, 7, 5), (6, 1, 3, 3), {"group": 6, "pads": (1, 1, 1, 1)}, {"group": 6, "strides": (2, 1)}),
        _conv((1, 4, 7, 5), (8, 1, 3, 2), {"group": 4, "dilations": (2, 1)}),
        _conv((2, 6, 7, 5), (4, 3, 3, 3), {"group": 2, "pads": (1, 1, 1, 1)}),
        _conv((2, 6, 7, 5), (4, 3, 1, 1), {"group": 2}),
        _conv((2, 3, 17), (5, 3, 4), {"strides": (2,), "pads": (1, 2)}),
        _conv((1, 2, 5, 6, 7), (3, 2, 2, 3, 2), {"strides": (1, 2, 1), "pads": (1, 0, 1, 0, 1, 0)}),
        _conv((1, 3, 8, 8), (4, 3, 3, 3), {"pads": (1, 1, 1, 1)}, dtype=np.float16),
    ),
    "ConvTranspose": join(
        _deconv((2, 3, 4, 5), (3, 4, 3, 3), {}, {"strides": (2, 3)}, {"strides": (2, 2), "pads": (1, 0, 1, 1)}, bias=4),
        _deconv((1, 3, 4, 5), (3, 2, 3, 2), {"strides": (2, 2), "output_padding": (1, 1)}, {"dilations": (2, 2)}),
        _deconv((1, 3, 4, 5), (3, 2, 3, 3), {"strides": (2, 2), "output_shape": (8, 10)}),
        _deconv(
            (1, 3, 4, 5), (3, 2, 3, 3), *({"strides": (2, 2), "auto_pad": a} for a in ("SAME_UPPER", "SAME_LOWER"))
        ),
        _deconv((1, 4, 4, 5), (4, 3, 3, 3), {"group": 2, "strides": (2, 2)}, bias=6),
        _deconv((2, 3, 6), (3, 4, 3), {"strides": (2,)}),
        _deconv((1, 2, 3, 4, 3), (2, 3, 2, 2, 2), {"strides": (2, 1, 2)}),
    ),
    "ConvInteger": each(
        lambda rng: [
            integers(rng, 0, 255, 1, 3, 7, 6, dtype=np.uint8),
            integers(rng, 0, 255, 4, 3, 3, 3, dtype=np.uint8),
            scalar(120, np.uint8),
            scalar(97, np.uint8),
        ],
        {"pads": (1, 1, 1, 1)},
        {"strides": (2, 2)},
    ),
}


def _deform(rng: Rng, group: int = 1, sets: int = 1, mask: bool = False) -> list[Any]:
    found: list[Any] = [
        normal(rng, 2, 4, 7, 6),
        normal(rng, 6, 4 // group, 3, 2),
        normal(rng, 2, sets * 12, 5, 5),
        None,
    ]
    return [*found, uniform(rng, 0, 1, 2, sets * 6, 5, 5)] if mask else found[:3]


DEFORM: dict[str, Samples] = {
    "DeformConv": join(each(_deform), each(lambda rng: _deform(rng, 2, 2, True), {"group": 2, "offset_group": 2})),
    "Col2Im": each(
        lambda rng: [normal(rng, 2, 12, 8), ints(7, 6), ints(3, 2)],
        {"strides": (2, 1), "pads": (0, 0, 1, 0), "dilations": (2, 2)},
    ),
    "MaxUnpool": each(
        lambda rng: [normal(rng, 1, 2, 2, 3), np.arange(48).reshape(2, 4, 6)[:, ::2, 1::2].reshape(1, 2, 2, 3)],
        {"kernel_shape": (2, 2), "strides": (2, 2)},
    ),
}


def _pools(*attrs: dict[str, Any], outputs: int = 1) -> Samples:
    return each(lambda rng: [normal(rng, 2, 3, 9, 11)], *attrs, outputs=outputs)


_K33 = {"kernel_shape": (3, 3)}
_COMMON: tuple[dict[str, Any], ...] = (
    _K33,
    {**_K33, "strides": (2, 2), "pads": (1, 1, 1, 1)},
    {**_K33, "strides": (2, 3), "pads": (0, 1, 1, 0), "ceil_mode": 1},
    {"kernel_shape": (2, 4), "dilations": (2, 2), "strides": (1, 2)},
    {**_K33, "auto_pad": "SAME_UPPER", "strides": (2, 2)},
    {"kernel_shape": (2, 2), "auto_pad": "SAME_LOWER"},
    {"kernel_shape": (1, 1), "strides": (2, 2)},
)

POOL: dict[str, Samples] = {
    "MaxPool": join(
        _pools(*_COMMON),
        _pools({**_K33, "strides": (2, 2), "pads": (1, 1, 1, 1)}, {**_K33, "storage_order": 1}, outputs=2),
        each(lambda rng: [normal(rng, 2, 3, 13)], {"kernel_shape": (3,), "strides": (2,)}),
        each(lambda rng: [normal(rng, 1, 2, 5, 6, 7)], {"kernel_shape": (2, 3, 2), "strides": (2, 1, 2)}),
        each(lambda rng: [integers(rng, 0, 255, 1, 2, 6, 7, dtype=np.uint8)], {**_K33, "pads": (1, 1, 1, 1)}),
    ),
    "AveragePool": join(
        _pools(*_COMMON, {**_K33, "pads": (1, 1, 1, 1), "count_include_pad": 1, "strides": (2, 2)}),
        _pools({**_K33, "pads": (1, 1, 1, 1), "count_include_pad": 1, "strides": (3, 3), "ceil_mode": 1}),
        each(lambda rng: [normal(rng, 2, 3, 13)], {"kernel_shape": (3,), "strides": (2,), "pads": (1, 1)}),
    ),
    "LpPool": _pools(_K33, {**_K33, "p": 3, "strides": (2, 2), "pads": (1, 1, 1, 1)}, {**_K33, "p": 1}),
    **{
        name: join(each(lambda rng: [normal(rng, 2, 3, 5, 7)]), each(lambda rng: [normal(rng, 2, 3, 9)]))
        for name in ("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool")
    },
}


def _tensors(sizes: Sequence[tuple[int, ...]], rng: Rng) -> list[Any]:
    return [normal(rng, *size) for size in sizes]


def _products(*pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> Samples:
    return over(pairs, lambda rng, pair: [normal(rng, *pair[0]), normal(rng, *pair[1])])


MATMUL: dict[str, Samples] = {
    "MatMul": join(
        _products(
            ((5, 7), (7, 3)),
            ((2, 3, 5, 7), (7, 4)),
            ((2, 1, 5, 7), (3, 7, 2)),
            ((7,), (7, 3)),
            ((5, 7), (7,)),
            ((7,), (7,)),
        ),
        each(lambda rng: [normal(rng, 3, 33, dtype=np.float16), normal(rng, 33, 4, dtype=np.float16)]),
        each(lambda rng: [integers(rng, -9, 9, 3, 5, dtype=np.int32), integers(rng, -9, 9, 5, 2, dtype=np.int32)]),
    ),
    "Gemm": join(
        each(lambda rng: [normal(rng, 5, 7), normal(rng, 7, 3)], {}, {"alpha": 0.5}),
        each(
            lambda rng: [normal(rng, 7, 5), normal(rng, 3, 7), normal(rng, 3)], {"transA": 1, "transB": 1, "beta": 0.3}
        ),
        each(lambda rng: [normal(rng, 5, 7), normal(rng, 3, 7), normal(rng, 5, 1)], {"transB": 1, "alpha": 1.5}),
        each(lambda rng: [normal(rng, 5, 7), normal(rng, 7, 3), scalar(0.5, np.float32)]),
    ),
    "Einsum": join(
        *(
            each(partial(_tensors, sizes), {"equation": equation})
            for equation, sizes in (
                ("bij,bjk->bik", ((2, 3, 4), (2, 4, 5))),
                ("ij->ji", ((3, 4),)),
                ("ii->i", ((4, 4),)),
                ("ij", ((3, 4),)),
                ("...ij,...jk->...ik", ((2, 1, 3, 4), (5, 4, 2))),
                ("bhwc, hkc -> bhwk", ((2, 3, 4, 5), (3, 6, 5))),
                ("i,j,k->kij", ((2,), (3,), (4,))),
                ("ba,bc", ((3, 2), (3, 4))),
            )
        )
    ),
}


def _affine(*shape: int) -> Any:
    return lambda rng: [normal(rng, *shape), uniform(rng, 0.5, 2, shape[1]), normal(rng, shape[1])]


NORM: dict[str, Samples] = {
    "BatchNormalization": join(
        over(
            ((2, 3, 5, 4), (4, 6), (2, 3, 7)),
            lambda rng, s: [*_affine(*s)(rng), normal(rng, s[1]), uniform(rng, 0.5, 2, s[1])],
            {},
            {"epsilon": 1e-2},
        ),
        each(
            lambda rng: [*_affine(4, 3, 5, 2)(rng), normal(rng, 3), uniform(rng, 0.5, 2, 3)],
            {"training_mode": 1, "momentum": 0.7},
            outputs=3,
        ),
    ),
    "InstanceNormalization": join(each(_affine(2, 3, 5, 4), {}, {"epsilon": 1e-2}), each(_affine(2, 3, 9))),
    "GroupNormalization": join(each(_affine(2, 6, 5, 4), {"num_groups": 3}, {"num_groups": 1, "epsilon": 1e-2})),
    "MeanVarianceNormalization": each(lambda rng: [normal(rng, 3, 4, 5, 2)], {}, {"axes": (1, 3)}),
    "LayerNormalization": join(
        each(lambda rng: [normal(rng, 3, 4, 5), normal(rng, 5), normal(rng, 5)], {}, {"epsilon": 1e-2}, outputs=3),
        each(lambda rng: [normal(rng, 3, 4, 5), normal(rng, 4, 5)], {"axis": 1}, outputs=3),
    ),
    "RMSNormalization": join(
        each(lambda rng: [normal(rng, 3, 4, 5), normal(rng, 5)], {}, {"epsilon": 1e-2}),
        each(lambda rng: [normal(rng, 3, 4, 5), normal(rng, 4, 5)], {"axis": 1}),
    ),
    "LRN": each(
        lambda rng: [normal(rng, 2, 7, 3, 4)], {"size": 3}, {"size": 5, "alpha": 0.5, "beta": 0.6, "bias": 2.0}
    ),
    "LpNormalization": each(lambda rng: [normal(rng, 3, 4, 5)], {}, {"axis": 1, "p": 1}),
}

_REDUCE: tuple[Any, ...] = ({}, {"keepdims": 0}, {"noop_with_empty_axes": 1})


def _reduction(low: float = -2, high: float = 2, whole: bool = True) -> Samples:
    axes = ((1,), (-1, 0), (0, 1, 2))
    keep: tuple[dict[str, Any], ...] = ({}, {"keepdims": 0})
    parts = [
        each(lambda rng: [uniform(rng, low, high, 3, 4, 5)], *_REDUCE),
        over(axes, lambda rng, a: [uniform(rng, low, high, 3, 4, 5), ints(*a)], *keep),
    ]
    if whole:
        parts.append(over(axes, lambda rng, a: [integers(rng, 1, 4, 3, 4, 5, dtype=np.int32), ints(*a)], *keep))
    return join(*parts)


REDUCTION: dict[str, Samples] = {
    **{name: _reduction() for name in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceSumSquare")},
    **{name: _reduction(0.5, 2) for name in ("ReduceMean", "ReduceL2")},
    "ReduceProd": join(
        _reduction(whole=False), each(lambda rng: [integers(rng, -3, 4, 3, 4, dtype=np.int32), ints(1)])
    ),
    "ReduceLogSum": _reduction(0.5, 2, whole=False),
    "ReduceLogSumExp": _reduction(whole=False),
    **{
        name: join(
            each(lambda rng: [normal(rng, 3, 4, 5)], {}, {"axis": -1, "keepdims": 0}, {"axis": 1}),
            each(
                lambda rng: [integers(rng, 0, 3, 4, 6, dtype=np.float32)],
                {"axis": 1},
                {"axis": 1, "select_last_index": 1},
            ),
        )
        for name in ("ArgMax", "ArgMin")
    },
    **{
        name: each(
            lambda rng: [uniform(rng, 0.5, 1.5, 3, 5), scalar(1, np.int32)],
            {},
            {"exclusive": 1},
            {"reverse": 1},
            {"reverse": 1, "exclusive": 1},
        )
        for name in ("CumSum", "CumProd")
    },
    **{
        name: join(
            each(lambda rng: [normal(rng, 3, 4, 5)], {}, {"axis": 0}, {"axis": 1}),
            each(lambda rng: [normal(rng, 7) * 50]),
        )
        for name in ("Softmax", "LogSoftmax", "Hardmax")
    },
}
