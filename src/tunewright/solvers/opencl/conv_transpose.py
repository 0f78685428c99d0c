"""Transposed convolutions in the plain layout, gathered: every output is written once, by the phase it belongs to."""

from __future__ import annotations

from .base import both
from .conv_plain import ConvPlain


class ConvTranspose(ConvPlain):
    """As `ConvPlain`, once for each phase of the output (see `conv_slab`)."""

    family = "conv_transpose"
    ops = frozenset({"ConvTranspose"})
    rank = 50


SOLVERS = both(ConvTranspose)
