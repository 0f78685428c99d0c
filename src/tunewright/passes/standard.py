"""THE ordered list of passes: device-neutral first, device-specific last.

``NEUTRAL`` and ``DEVICE`` run once, at compile time, with dimensions possibly symbolic. ``SPECIALISE`` runs for each new set of
concrete input shapes, so it must stay cheap: types, shape arithmetic, and what only concrete shapes allow.
"""

from __future__ import annotations

from .base import Pass
from .simplify import DeadCode, Propagate, UnknownOps

NEUTRAL: tuple[Pass, ...] = (UnknownOps(), DeadCode(), Propagate(), DeadCode())
DEVICE: tuple[Pass, ...] = ()
SPECIALISE: tuple[Pass, ...] = (Propagate(), DeadCode())
