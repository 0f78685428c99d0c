"""The ordered list of passes: device-neutral first, device-specific last.

``NEUTRAL`` and ``DEVICE`` run once, at compile time; dimensions may be symbolic. ``SPECIALISE`` runs for each new set
of concrete input shapes, and therefore must be cheap: types, shape arithmetic, and rules that need concrete shapes.
"""

from __future__ import annotations

import difflib
from functools import cache

from ..errors import SettingsError
from ..settings import Settings
from . import (
    attention,
    fuse_linear,
    grouping,
    identities,
    openvino,
    recognise,
    recurrent,
    rotary,
    shape_values,
    shuffle,
    tables,
    views,
)
from .attention_structure import RecogniseAttention
from .base import Pass, Repeat
from .collected import CollectedRows
from .control import InlineBranches, SinkConstants, TypeCaptures, UnchangedStates, UnrollLoops
from .conv_pair import ConvPairs
from .counted import CountedLoops
from .early_strides import EarlyStrides
from .einsum import LowerEinsum
from .excite import SqueezeExcite
from .fuse import Fuse
from .grow_states import GrowStates
from .hoist import HoistInvariants
from .layout import AssignLayouts
from .past_keys import PastKeys
from .pattern import RewritePass
from .pieces import Pieces
from .pixels import Pixels
from .precision import Narrow
from .quantised import Quantised
from .recurrent_loops import RecurrentLoops
from .rotary import RecogniseRotary
from .scan_axes import ScanAxes
from .simplify import CommonSubexpressions, DeadCode, FlushDenormals, FoldQuantised, Propagate, UnknownOps
from .skip_norm import SkipNorm
from .spread_norm import SpreadNorm
from .strided import StrideAttention
from .weights import TurnedWeights
from .widen import WidenHalves

#: These run only when no loop can become a layer any more.
_LAST = (HoistInvariants(), CollectedRows(), CountedLoops(), ScanAxes(), UnrollLoops())

CLEAN_UP = Repeat(
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
CLEAN_LOOPS = Repeat(tuple(one for one in CLEAN_UP.passes if one not in _LAST))

NEUTRAL: tuple[Pass | Repeat, ...] = (
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

DEVICE: tuple[Pass | Repeat, ...] = (
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

SPECIALISE: tuple[Pass | Repeat, ...] = (
    # Concrete shapes decide branches, and the lengths of loops.
    Repeat((SinkConstants(), Propagate(bodies=True), InlineBranches(), CountedLoops(), ScanAxes())),
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
    Pixels(),
    Pieces(),
)


@cache
def names() -> frozenset[str]:
    """Names of every pass, rule and fusion: the values of DISABLED_PASSES."""
    found = set()
    for one in (*NEUTRAL, *DEVICE, *SPECIALISE):
        for single in one.passes if isinstance(one, Repeat) else (one,):
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
