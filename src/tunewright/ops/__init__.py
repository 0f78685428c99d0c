"""What operations are. `lookup` finds one: a family module, an extension, or ONNX's own definition of it."""

from __future__ import annotations

from functools import cache, lru_cache

from .. import discovery
from .base import OpSpec

__all__ = ["lookup", "names"]


#: packages of operators that few models have
RARE = ("microsoft", "openvino", "ml")
#: a request runs them itself: all that is asked is whether they are there
CONTROL = ("If", "Loop", "Scan")


@cache
def _known(rare: bool) -> dict[str, OpSpec]:
    """Ours and those of extensions; without ``rare``, modules of such operators need not be imported."""
    skip = None if rare else lambda name: name.partition(".")[0] in RARE
    return discovery.find("tunewright.ops", key=lambda spec: spec.name, skip=skip)


@lru_cache(maxsize=1 << 12)  # bounded: a name is whatever a model says
def lookup(op: str) -> OpSpec | None:
    """The definition of ``Conv`` or ``domain::Name``; None when nobody defines it."""
    spec = _known(False).get(op)
    if spec is None and op not in CONTROL:
        spec = _known(True).get(op)
    if spec is None:
        from . import standard

        spec = standard.define(op)
    return spec


def names(rare: bool = True) -> list[str]:
    """Every operation with a definition of our own (ONNX's remaining ones run through onnx.reference); without
    ``rare`` those of other domains may be missing, whose modules are then not imported for it."""
    return sorted(_known(rare))
