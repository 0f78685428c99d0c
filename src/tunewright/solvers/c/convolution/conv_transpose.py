"""Transposed convolutions in the plain layout: every output is written once, by the phase to which it belongs."""

from __future__ import annotations

from ..source.base import both
from .conv_plain import ConvPlain


class ConvTranspose(ConvPlain):
    """Works like `ConvPlain`, once for each phase of the output (see `conv_slab`)."""

    family = "conv_transpose"
    ops = frozenset({"ConvTranspose"})
    rank = 50


SOLVERS = both(ConvTranspose)
