"""The ordered list of passes: device-neutral first, device-specific last.

``NEUTRAL`` and ``DEVICE`` run once, at compile time; dimensions may be symbolic. ``SPECIALISE`` runs for each new set
of concrete input shapes, and therefore must be cheap: types, shape arithmetic, and rules that need concrete shapes.
"""

from __future__ import annotations

import difflib
from functools import cache

from ..errors import SettingsError
from ..settings import Settings
from .attention import attention, rotary
from .attention.attention_structure import RecogniseAttention
from .attention.grow_states import GrowStates
from .attention.past_keys import PastKeys
from .attention.rotary import RecogniseRotary
from .attention.strided import StrideAttention
from .base import Pass, RepeatedPasses
from .cleanup import identities, shape_values
from .cleanup.simplify import CommonSubexpressions, DeadCode, FlushDenormals, FoldQuantised, Propagate, UnknownOps
from .control.collected_outputs import CollectedRows
from .control.control import InlineBranches, SinkConstants, TypeCaptures, UnchangedStates, UnrollLoops
from .control.hoist import HoistInvariants
from .control.recurrent_loops import RecurrentLoops
from .control.scan_axes import ScanAxes
from .control.trip_counts import CountedLoops
from .fusion import fuse_linear
from .fusion.conv_pair import ConvPairs
from .fusion.early_strides import EarlyStrides
from .fusion.fuse import Fuse
from .fusion.pieces import PiecesPass
from .fusion.pixels import PixelsPass
from .fusion.spread_norm import SpreadNorm
from .pattern import RewritePass
from .placement import views
from .placement.layout import AssignLayouts
from .placement.precision import Narrow
from .placement.weights import TurnedWeights
from .placement.widen import WidenHalves
from .recognition import grouping, openvino, recognise, recurrent, shuffle, tables
from .recognition.einsum import LowerEinsum
from .recognition.quantised import Quantised
from .recognition.skip_norm import SkipNorm
from .recognition.squeeze_excite import SqueezeExcite

#: These run only when no loop can become a layer any more.
_LAST = (HoistInvariants(), CollectedRows(), CountedLoops(), ScanAxes(), UnrollLoops())

CLEAN_UP = RepeatedPasses(
    (
        UnchangedStates(),
        SinkConstants(),
        Propagate(keep_quantised=True),
        TypeCaptures(),
        InlineBranches(),
        *_LAST,
        RewritePass("openvino", openvino.RULES),
        RewritePass("shape-values", shape_values.RULES),
        RewritePass("identities", identities.RULES),
        RewritePass("tables", tables.FOLDED),
        CommonSubexpressions(),
        DeadCode(),
    )
)
#: A loop must be clean and whole to be recognised.
CLEAN_LOOPS = RepeatedPasses(tuple(one for one in CLEAN_UP.passes if one not in _LAST))

NEUTRAL: tuple[Pass | RepeatedPasses, ...] = (
    UnknownOps(),
    DeadCode(),
    CLEAN_LOOPS,
    RecurrentLoops(),
    CLEAN_UP,
    LowerEinsum(),
    RewritePass("recognise-softmax", recognise.SOFTMAX),
    RecogniseAttention(),
    RecogniseRotary("recognise-rotary", rotary.RULES),
    RewritePass("recognise", (*recognise.RULES, *attention.GROUPS, *attention.HEADS, *recurrent.RULES, *tables.RULES)),
    RewritePass("fuse-linear", fuse_linear.RULES),
    CLEAN_UP,
    TurnedWeights(),
    EarlyStrides(),
    FlushDenormals(),
)

DEVICE: tuple[Pass | RepeatedPasses, ...] = (
    Narrow(),
    WidenHalves(),
    Quantised(),
    RewritePass("group-convolutions", grouping.RULES),
    RewritePass("channel-shuffle", shuffle.RULES),
    FoldQuantised(),
    SkipNorm(),
    DeadCode(),
    Fuse(),
    StrideAttention(),
)

#: Concrete shapes decide branches, and the lengths of loops.
KNOW_SHAPES = RepeatedPasses((SinkConstants(), Propagate(bodies=True), InlineBranches(), CountedLoops(), ScanAxes()))
SPECIALISE: tuple[Pass | RepeatedPasses, ...] = (
    KNOW_SHAPES,
    PastKeys(),
    GrowStates(),
    LowerEinsum(),
    RewritePass("recognise-softmax", recognise.SOFTMAX),
    attention.ScoresApart(),
    RecogniseAttention(),
    RecogniseRotary("recognise-rotary", rotary.RULES),
    RewritePass("recognise-attention", (*recognise.ATTENTION, *attention.GROUPS, *attention.HEADS)),
    RewritePass("views", views.RULES),
    SpreadNorm(),
    DeadCode(),
    Fuse(),
    StrideAttention(),
    SqueezeExcite(),
    AssignLayouts(),
    ConvPairs(),
    PixelsPass(),
    PiecesPass(),
)


@cache
def names() -> frozenset[str]:
    """Names of every pass, rule and fusion: the values of DISABLED_PASSES."""
    found = set()
    for one in (*NEUTRAL, *DEVICE, *SPECIALISE):
        for single in one.passes if isinstance(one, RepeatedPasses) else (one,):
            parts = getattr(single, "rules", ()) or getattr(single, "fusions", ())
            found |= {single.name, *(part.name for part in parts)}
    return frozenset(found)


def check_disabled(settings: Settings) -> None:
    """Raise SettingsError when DISABLED_PASSES contains an unknown name, which would silently disable nothing."""
    for name in filter(None, map(str.strip, settings.disabled_passes.split(","))):
        if name not in names():
            close = difflib.get_close_matches(name, names(), n=1)
            hint = f"did you mean {close[0]}?" if close else "`tunewright graph MODEL --why` names those at work"
            raise SettingsError(f"there is no pass or rule {name!r}", where="DISABLED_PASSES", hint=hint)
