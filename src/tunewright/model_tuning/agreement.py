"""Compare the outputs of two networks that compute the same function."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ir.types import DType
from ..ops.tolerance import TOLERANCES, deviation
from ..runtime.requests.request import DeviceRequest


def coarsest(*requests: DeviceRequest) -> float:
    """Return the tolerance of the coarsest type inside the networks.

    Outputs may have a finer type than the values that they are computed from.
    """
    steps = [step for request in requests for plan in request.model.program.plans for step in plan.steps]
    types = {v.tensor.dtype for step in steps for v in (*step.node.inputs, *step.node.outputs) if v and v.tensor}
    types |= {step.kernel.like for step in steps if step.kernel is not None and step.kernel.like is not None}
    return max((TOLERANCES[dtype].network for dtype in types if dtype in TOLERANCES), default=0.0)


def agree(mine: Mapping[str, Any], other: Mapping[str, Any], inside: float) -> tuple[bool, float]:
    """Return whether two networks' outputs agree within the table of tolerances, and their largest deviation.

    ``inside``: tolerance of the type in which floats are computed.
    """
    worst, right = 0.0, True
    for name, a in mine.items():
        b = other[name]
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.dtype == object:
            continue  # sequences and strings consist of tensors from kernels that were checked
        error = deviation(b, a) if a.shape == b.shape else math.inf
        limit = TOLERANCES.get(DType.of_numpy(a.dtype))
        right = right and error <= (max(limit.network, inside) if limit is not None else 0.0)
        worst = max(worst, error)
    return right, worst
