"""Whether two networks that compute the same thing agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ir.types import DType
from ..ops.tolerance import TOLERANCES, deviation
from ..runtime.request import DeviceRequest


def coarsest(*requests: DeviceRequest) -> float:
    """The tolerance of the coarsest type that networks compute in: their outputs may be finer than what they are of."""
    steps = [step for request in requests for plan in request.model.program.plans for step in plan.steps]
    types = {v.tensor.dtype for step in steps for v in (*step.node.inputs, *step.node.outputs) if v and v.tensor}
    types |= {step.kernel.like for step in steps if step.kernel is not None and step.kernel.like is not None}
    return max((TOLERANCES[dtype].network for dtype in types if dtype in TOLERANCES), default=0.0)


def agree(mine: Mapping[str, Any], other: Mapping[str, Any], inside: float) -> tuple[bool, float]:
    """Whether two networks' outputs are equal within the table of tolerances, and how far they are apart.

    ``inside``: the tolerance of what floats are computed in.
    """
    worst, right = 0.0, True
    for name, a in mine.items():
        b = other[name]
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.dtype == object:
            continue  # sequences and texts are made of tensors that went through kernels that were checked
        error = deviation(b, a) if a.shape == b.shape else math.inf
        limit = TOLERANCES.get(DType.of_numpy(a.dtype))
        right = right and error <= (max(limit.network, inside) if limit is not None else 0.0)
        worst = max(worst, error)
    return right, worst
