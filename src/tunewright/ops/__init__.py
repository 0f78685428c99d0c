"""What operations are. `lookup` finds one: a family module, an extension, or ONNX's own definition of it."""

from __future__ import annotations

from functools import cache, lru_cache

from .. import discovery
from .base import OpSpec

__all__ = ["lookup", "names"]


@cache
def _known() -> dict[str, OpSpec]:
    return discovery.find("tunewright.ops", key=lambda spec: spec.name)


@lru_cache(maxsize=1 << 12)  # bounded: a name is whatever a model says
def lookup(op: str) -> OpSpec | None:
    """The definition of ``Conv`` or ``domain::Name``; None when nobody defines it."""
    spec = _known().get(op)
    if spec is None:
        from . import standard

        spec = standard.define(op)
    return spec


def names() -> list[str]:
    """Every operation with a definition of our own (ONNX's remaining ones run through onnx.reference)."""
    return sorted(_known())
