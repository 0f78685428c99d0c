"""`Preprocess` in plain numpy, for the inputs of another engine.

This second implementation is intended: the nodes that a preprocessing becomes are part of the comparison.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from ..frontend.preprocess_inputs import Preprocess
    from ..ir.types import TensorType


def prepared(how: Preprocess, value: np.ndarray[Any, Any], type: TensorType) -> np.ndarray[Any, Any]:
    """Convert an input to the form that the network takes (``type``). The computation is in float64."""
    import numpy as np

    found = value if "N" in how.layout else value[None]
    order = how.layout if "N" in how.layout else f"N{how.layout}"
    found = found.transpose([order.index(axis) for axis in how.model_layout])
    channels = how.model_layout.index("C")
    if how.reverse_channels:
        found = np.flip(found, channels)
    if how.resize is None and how.mean is None and how.scale is None:
        return found.astype(type.dtype.numpy)
    found = found.astype(np.float64)
    if how.resize is not None:
        for axis in (how.model_layout.index(side) for side in "HW"):
            weights = _weights(how.resize, found.shape[axis], _known(type, axis))
            found = np.moveaxis(np.moveaxis(found, axis, -1) @ weights, -1, axis)
    along = [-1 if axis == channels else 1 for axis in range(4)]
    for numbers, apply in ((how.mean, np.subtract), (how.scale, np.divide)):
        if numbers is not None:
            found = apply(found, np.asarray(numbers, np.float64).reshape(along if np.size(numbers) > 1 else -1))
    return found.astype(type.dtype.numpy)


def _known(type: TensorType, axis: int) -> int:
    """Return a size of the network's input, which is known because resizing requires it."""
    size = (type.shape or ())[axis]
    assert isinstance(size, int)
    return size


def _weights(mode: str, size: int, target: int) -> np.ndarray[Any, Any]:
    """Return the weight of each of ``size`` pixels in each of ``target`` pixels on one axis. Edge pixels repeat."""
    import numpy as np

    made = np.zeros((size, target))
    to = np.arange(target)
    if mode == "nearest":
        made[np.minimum(to * size // target, size - 1), to] = 1
        return made
    at = (to + 0.5) * size / target - 0.5
    first = np.floor(at).astype(int)
    for tap in (0, 1) if mode == "linear" else (-1, 0, 1, 2):
        far = np.abs(at - (first + tap))
        share = 1 - far if mode == "linear" else _cubic(far)
        np.add.at(made, (np.clip(first + tap, 0, size - 1), to), share)
    return made


def _cubic(far: np.ndarray[Any, Any], a: float = -0.75) -> np.ndarray[Any, Any]:
    """Keys's cubic kernel, for distances from 0 to 2."""
    import numpy as np

    near = (a + 2) * far**3 - (a + 3) * far**2 + 1
    return np.where(far <= 1, near, a * (far**3 - 5 * far**2 + 8 * far - 4))
