"""Folds many elements into one (a sum, a maximum, ...) in C, for reductions and poolings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType

from .emit import COMPUTE, Source

#: the least number of elements of a work-item: about 5 us of work
GRAIN = 16384
#: The most work-items of a launch per core: enough that a late core does not delay the rest.
ITEMS_PER_UNIT = 4

_BITS = {"i8": 8, "u8": 8, "i16": 16, "u16": 16, "i32": 32, "u32": 32, "i64": 64, "u64": 64}
#: Wrapping sums are computed in unsigned types: signed overflow is undefined in C.
_WRAPPING = {8: DType.UINT32, 16: DType.UINT32, 32: DType.UINT32, 64: DType.UINT64}


@dataclass(frozen=True)
class Fold:
    """How elements are folded. The texts are C expressions of type ``acc``, except ``finish``."""

    acc: DType
    #: the result of folding no element
    start: str
    #: the contribution of an element ``v``; ``top`` is the largest element, where the kernel knows it
    each: str
    #: joins two partial results ``a`` and ``b``; both are plain names
    join: str
    #: The result from ``a``, the number of elements ``N`` and ``top``, in the type that the output is computed in.
    finish: str = "a"

    @property
    def type(self) -> str:
        return COMPUTE[self.acc]

    def define(self, source: Source, element: str, result: str | None = None) -> None:
        """Adds ``fold_start()``, ``fold_each(v, top)`` and ``fold_join(a, b)`` to a source.

        Given the C type of results, it also adds ``fold_finish(a, N, top)``. ``element`` is the C type of v and top.
        """
        t = self.type
        source.function(f"INLINE {t} fold_start(void) {{ return {self.start}; }}")
        source.function(f"INLINE {t} fold_each({element} v, {element} top UNUSED) {{ return {self.each}; }}")
        source.function(f"INLINE {t} fold_join({t} a, {t} b) {{ return {self.join}; }}")
        if result is not None:
            params = f"{t} a, int N UNUSED, {element} top UNUSED"
            source.function(f"INLINE {result} fold_finish({params}) {{ return {self.finish}; }}")

    def finished(self, finish: str) -> Fold:
        return replace(self, finish=finish)


def is_float(dtype: DType) -> bool:
    """Whether elements of this type are computed in floating point."""
    return COMPUTE[dtype] in ("f32", "f64")


def is_nan(dtype: DType, x: str) -> str:
    """The C expression that tests whether x, in the type it is computed in, is NaN."""
    return f"{x} != {x}" if is_float(dtype) else "0"


def wide(dtype: DType) -> DType:
    """The type in which elements are computed."""
    return DType.FLOAT32 if COMPUTE[dtype] == "f32" else dtype


def total(dtype: DType, each: str = "v") -> Fold:
    """The sum of the contributions of elements; integers wrap."""
    acc = wide(dtype) if is_float(dtype) else _WRAPPING[_BITS[COMPUTE[dtype]]]
    return Fold(acc, "0", each, "a + b")


def product(dtype: DType) -> Fold:
    """The product of elements; integers wrap."""
    return replace(total(dtype), start="1", join="a * b")


def extremum(dtype: DType, largest: bool, nan: bool = True) -> Fold:
    """The maximum or minimum. With ``nan``, one NaN makes the result NaN, as in numpy; without, NaNs are skipped
    (cheaper)."""
    sign = ">" if largest else "<"
    better = f"(b {sign} a ? b : a)"
    if is_float(dtype):
        infinity = f"{'-' if largest else ''}1.0f / 0.0f"
        return Fold(wide(dtype), infinity, "v", f"b != b ? b : {better}" if nan else better)
    return Fold(dtype, limit(dtype, largest), "v", better)


def limit(dtype: DType, lowest: bool) -> str:
    """The lowest or highest value of an integer type."""
    if dtype is DType.BOOL:
        return "0" if lowest else "1"
    name = COMPUTE[dtype]
    top = f"((u64)1 << {_BITS[name] - 1})"
    if name[0] == "u":
        return "0" if lowest else f"({name})({top} - 1 + {top})"
    return f"({name}){top}" if lowest else f"({name})({top} - 1)"


def rows(source: Source, how: Fold, buffer: str, base: str, loop: str = "", top: str = "0") -> str:
    """Statements that fold elements ``begin`` to ``end`` of rows at offset ``base`` of a buffer into a new variable
    ``rest``.

    ``loop`` is the head of the loop over rows, with its open brace; without it there is one row. A long row is folded
    in LANES independent partial results, which become vectors.
    """

    def element(at: str) -> str:
        return f"fold_each({source.load(buffer, f'{base} + {at}')}, {top})"

    return f"""
{how.type} rest = fold_start();
if (end - begin < LANES) {{
  {loop or "{"}
    for (int i = begin; i < end; i++) rest = fold_join(rest, {element("i")});
  }}
}} else {{
  {how.type} lane[LANES];
  for (int l = 0; l < LANES; l++) lane[l] = fold_start();
  {loop or "{"}
    int i = begin;
    for (; i + LANES <= end; i += LANES)
      for (int l = 0; l < LANES; l++) lane[l] = fold_join(lane[l], {element("i + l")});
    for (; i + 8 <= end; i += 8)
      for (int l = 0; l < 8; l++) lane[l] = fold_join(lane[l], {element("i + l")});
    for (; i < end; i++) rest = fold_join(rest, {element("i")});
  }}
  UNROLL for (int h = LANES / 2; h > 0; h /= 2)
    UNROLL for (int l = 0; l < h; l++) lane[l] = fold_join(lane[l], lane[l + h]);
  rest = fold_join(rest, lane[0]);
}}"""


def lanes_for(size: int) -> int:
    """LANES for rows of a size: few for short rows, which end before many lanes would pay."""
    return 16 if size < 512 else 64


def split(count: int, items: int) -> tuple[int, int]:
    """Splits ``count`` elements over at most ``items`` work-items: (elements of each, number of work-items)."""
    each = greater(1, -(-count // greater(1, items)))
    return each, -(-count // each)


def work_items(elements: int, units: int, grain: int = GRAIN) -> int:
    """The number of work-items for a number of elements."""
    return greater(1, lesser(ITEMS_PER_UNIT * units, elements // grain))


def around(dims: Sequence[int], axis: int) -> tuple[int, int, int]:
    """The number of elements before an axis, along it and behind it."""
    axis %= len(dims)
    return math.prod(dims[:axis]), dims[axis], math.prod(dims[axis + 1 :])


def unravel(index: str, offset: str, name: str, rank: int) -> str:
    """Statements that compute ``offset`` from a flat index over the dimensions name0, name1, ...

    The strides are name0_STRIDE, ... The statements change the variable ``index``.
    """
    lines = [f"int {offset} = 0;"]
    for i in reversed(range(1, rank)):
        lines.append(f"{offset} += {index} % {name}{i} * {name}{i}_STRIDE; {index} /= {name}{i};")
    return "\n".join([*lines, f"{offset} += {index} * {name}0_STRIDE;"])
