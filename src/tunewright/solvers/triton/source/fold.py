"""Triton statements that fold a tile of elements into one number per row (a sum, a maximum, ...)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tunewright.ir.types import DType

from .expr import number
from .rows import FLOATS
from .text import NAMES

#: -inf and NaN as text
LOWEST, NAN = number(-np.inf), number(np.nan)
_ALL = "propagate_nan=tl.PropagateNan.ALL"
#: The accumulation types of integers. The result wraps when it is stored.
_WIDE = {DType.BOOL: "tl.int32", DType.INT8: "tl.int32", DType.UINT8: "tl.int32", DType.INT16: "tl.int32"}


@dataclass(frozen=True)
class TritonFold:
    """A fold. Each lane of a tile has its own state. At the end the lanes of a row are combined."""

    #: name -> initial value
    states: Mapping[str, str]
    #: statements that add an element ``v`` to the states
    update: Sequence[str]
    #: statements that reduce the states from [rows, lanes] to [rows]
    collapse: Sequence[str]
    #: expression of the result, from the collapsed states
    result: str
    #: neutral element
    other: str = "0.0"
    #: functions to place in front of the kernel
    functions: str = ""

    def finished(self, result: str) -> TritonFold:
        return replace(self, result=result)


def real(dtype: DType) -> str:
    """The accumulation type of the elements."""
    if dtype in FLOATS:
        return "tl.float64" if dtype is DType.FLOAT64 else "tl.float32"
    return _WIDE.get(dtype, NAMES[dtype])


def read(pointer: str, mask: str, dtype: DType, how: TritonFold) -> str:
    """Load elements in the accumulation type. Where the mask is false, the result is the neutral element."""
    if dtype in FLOATS:
        return f"tl.load({pointer}, mask={mask}, other={how.other}).to({real(dtype)})"
    # the neutral element may not fit a narrow type
    return f"tl.where({mask}, tl.load({pointer}, mask={mask}, other=0).to({real(dtype)}), {how.other})"


def total(dtype: DType, each: str = "v") -> TritonFold:
    """The sum of the contributions ``each`` of the elements."""
    zero = "0.0" if dtype in FLOATS else "0"
    return TritonFold({"total": zero}, [f"total = total + {each}"], ["total = tl.sum(total, 1)"], "total", zero)


def product(dtype: DType) -> TritonFold:
    one = "1.0" if dtype in FLOATS else "1"
    function = "@triton.jit\ndef times(a, b):\n    return a * b\n\n\n"
    return TritonFold(
        {"total": one}, ["total = total * v"], ["total = tl.reduce(total, 1, times)"], "total", one, function
    )


def extremum(dtype: DType, largest: bool) -> TritonFold:
    """The maximum or minimum. Any NaN makes it NaN, as in numpy."""
    name = "max" if largest else "min"
    if dtype in FLOATS:
        start = LOWEST if largest else number(np.inf)
        collapse = [
            "odd = tl.max((best != best).to(tl.int32), 1)",
            f"best = tl.{name}(tl.where(best != best, {start}, best), 1)",
            f"best = tl.where(odd > 0, {NAN}, best)",
        ]
        return TritonFold({"best": start}, [f"best = tl.{name}imum(best, v, {_ALL})"], collapse, "best", start)
    start = limit(dtype, lowest=largest)
    return TritonFold(
        {"best": start}, [f"best = tl.{name}imum(best, v)"], [f"best = tl.{name}(best, 1)"], "best", start
    )


def limit(dtype: DType, lowest: bool) -> str:
    """The lowest or highest value of an integer type, as text."""
    if dtype is DType.BOOL:
        return "0" if lowest else "1"
    info = np.iinfo(dtype.numpy)
    return f"({int(info.min if lowest else info.max)})"


def exponentials(finite: bool) -> TritonFold:
    """The largest element (``best``) and the sum of exponentials relative to it (``total``), in one pass.

    A largest element of minus infinity is replaced by zero as the base, and so is plus infinity with ``finite``. With
    ``finite`` the sum is then infinite if an element is infinite. Without it the sum is NaN, like exp(inf - inf).
    """

    def base(of: str) -> str:
        return f"tl.where({f'tl.abs({of})' if finite else of} == {number(np.inf) if finite else LOWEST}, 0.0, {of})"

    update = [
        "now = tl.maximum(best, v)", f"base = {base('now')}",
        "total = total * tl.exp(best - base) + tl.exp(v - base)", "best = now",
    ]  # fmt: skip
    collapse = [
        "high = tl.max(best, 1)", f"base_of = {base('high')}",
        "total = tl.sum(total * tl.exp(best - base_of[:, None]), 1)", "best = high",
    ]  # fmt: skip
    result = f"tl.log(total) + {base('best')}"
    return TritonFold({"best": LOWEST, "total": "0.0"}, update, collapse, result, LOWEST)
