"""THE ordered list of passes: device-neutral first, device-specific last.

``NEUTRAL`` and ``DEVICE`` run once, at compile time, with dimensions possibly symbolic. ``SPECIALISE`` runs for each
new set of concrete input shapes, so it must stay cheap: types, shape arithmetic, what only concrete shapes allow.
"""

from __future__ import annotations

from . import fuse_linear, grouping, identities, openvino, recognise, recurrent, shape_values
from .base import Pass, Repeat
from .control import InlineBranches, SinkConstants, UnrollLoops
from .fuse import Fuse
from .layout import AssignLayouts
from .pattern import RewritePass
from .simplify import CommonSubexpressions, DeadCode, FlushDenormals, FoldQuantised, Propagate, UnknownOps

CLEAN_UP = Repeat(
    (
        SinkConstants(),
        Propagate(keep_quantised=True),
        InlineBranches(),
        UnrollLoops(),
        RewritePass("openvino", openvino.RULES),
        RewritePass("shape-values", shape_values.RULES),
        RewritePass("identities", identities.RULES),
        CommonSubexpressions(),
        DeadCode(),
    )
)

NEUTRAL: tuple[Pass | Repeat, ...] = (
    UnknownOps(),
    DeadCode(),
    CLEAN_UP,
    RewritePass("recognise", (*recognise.RULES, *recurrent.RULES)),
    RewritePass("fuse-linear", fuse_linear.RULES),
    CLEAN_UP,
    FlushDenormals(),
)

DEVICE: tuple[Pass | Repeat, ...] = (
    RewritePass("group-convolutions", grouping.RULES),
    FoldQuantised(),
    DeadCode(),
    Fuse(),
)

SPECIALISE: tuple[Pass | Repeat, ...] = (Propagate(), DeadCode(), Fuse(), AssignLayouts())
