"""Errors in the values of an operator's inputs, as messages. References raise them, kernels report them.

A kernel writes a `ReportedFault` with the value and the limit. The waiting thread raises the same error as the
reference.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class ReportedFault(IntEnum):
    """The kind of error, as a kernel writes it into its record. 0 means no error."""

    #: an index that may be negative; the limit is the size of its axis
    INDEX = 1
    #: a number from 0 to below the limit
    ROW = 2
    #: the length of a sequence; the limit is the number of steps
    LENGTH = 3
    #: an integer division by 0
    DIVISION = 4
    #: the number of a box; the limit is the most sample points of a box
    BOX = 5
    #: a number that must not be negative and has no upper bound
    NEGATIVE = 6


_TEXTS = {
    ReportedFault.INDEX: "an index is out of range: {value} for an axis of {limit}",
    ReportedFault.ROW: "an index is out of range: {value}, not 0 to {last}",
    ReportedFault.LENGTH: "a sequence length is out of range: {value}, not 0 to {limit}",
    ReportedFault.DIVISION: "an integer is divided by zero",
    ReportedFault.NEGATIVE: "an index is out of range: {value} is negative",
    ReportedFault.BOX: "box {value} has more than {limit} sample points",
}


def describe(fault: ReportedFault, value: int = 0, limit: int = 0) -> str:
    """The error message for a fault."""
    return _TEXTS[fault].format(value=value, limit=limit, last=limit - 1)


def check_indices(indices: Array, size: int) -> None:
    """Raise IndexError unless each is an index of an axis of ``size`` elements. Negative indices count from the axis'
    end."""
    _check(ReportedFault.INDEX, indices, -size, size, size)


def check_rows(rows: Array, count: int) -> None:
    """Raise IndexError unless each is from 0 to below ``count``."""
    _check(ReportedFault.ROW, rows, 0, count, count)


def check_natural(numbers: Array) -> None:
    """Raise IndexError if a number is negative."""
    _check(ReportedFault.NEGATIVE, numbers, 0, 1 << 64, 0)


def check_lengths(lengths: Array, steps: int) -> None:
    """Raise IndexError unless each sequence has 0 to ``steps`` steps."""
    _check(ReportedFault.LENGTH, lengths, 0, steps + 1, steps)


def check_divisors(divisors: Array) -> None:
    """Raise ZeroDivisionError if an integer divisor is zero."""
    if divisors.dtype.kind in "iu" and not divisors.all():
        raise ZeroDivisionError(describe(ReportedFault.DIVISION))


def _check(fault: ReportedFault, values: Array, begin: int, end: int, limit: int) -> None:
    if values.size and not begin <= values.min() <= values.max() < end:
        wrong = values[(values < begin) | (values >= end)]
        raise IndexError(describe(fault, int(wrong.reshape(-1)[0]), limit))
