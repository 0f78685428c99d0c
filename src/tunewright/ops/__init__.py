"""The operators. `lookup` finds the definition of one: in a family module, in an extension, or in ONNX itself."""

from __future__ import annotations

from functools import cache, lru_cache

from .. import discovery
from .base import OpSpec

__all__ = ["lookup", "names"]


#: Packages of rare operators.
RARE = ("microsoft", "openvino", "ml")
#: Operators that a request runs itself. A lookup of one must not import the rare modules.
CONTROL = ("If", "Loop", "Scan")


@cache
def _known(rare: bool) -> dict[str, OpSpec]:
    """Definitions of this package and of extensions. Without ``rare``, the modules in `RARE` are not imported."""
    skip = None if rare else lambda name: name.partition(".")[0] in RARE
    return discovery.find("tunewright.ops", key=lambda spec: spec.name, skip=skip)


@lru_cache(maxsize=1 << 12)  # bounded, because a model may contain any name
def lookup(op: str) -> OpSpec | None:
    """The definition of ``Conv`` or ``domain::Name``; None when no module and no ONNX schema defines it."""
    spec = _known(False).get(op)
    if spec is None and op not in CONTROL:
        spec = _known(True).get(op)
    if spec is None:
        from . import standard

        spec = standard.define(op)
    return spec


def names(rare: bool = True) -> list[str]:
    """The names of all operators that this package or an extension defines. Other operators of ONNX run through
    onnx.reference. Without ``rare``, operators of rare domains may be missing, because their modules are not
    imported."""
    return sorted(_known(rare))
