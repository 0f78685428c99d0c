"""STFT. Other operators of signal processing run through their definition in onnx."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import narrow, wide
from ..shapes import given, optional, tensor, value


def _frames(length: int, frame: int, step: int) -> int:
    if frame < 1 or step < 1:
        raise ValueError(f"frames of {frame} samples every {step} are not possible")
    if frame > length:
        raise ValueError(f"a frame of {frame} samples is longer than the signal of {length}")
    return (length - frame) // step + 1


def _check(rank: int, parts: Dim, onesided: bool) -> None:
    """Check that the signal is [batch, length] or [batch, length, 1] if real, [batch, length, 2] if complex."""
    if rank not in (2, 3) or (isinstance(parts, WHOLE) and parts not in (1, 2)):
        raise ValueError("the signal must be [batch, length], [batch, length, 1] or [batch, length, 2]")
    if parts == 2 and onesided:
        raise ValueError("a complex signal has no one-sided spectrum")


def _stft(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    signal, window, size = inputs[0], optional(inputs, 2), optional(inputs, 3)
    onesided = bool(attrs.get("onesided", 1))
    _check(signal.ndim, signal.shape[-1] if signal.ndim == 3 else 1, onesided)
    if window is None and size is None:
        raise ValueError("needs a window or a frame_length")
    frame = int(size.reshape(())) if size is not None else int(window.size)
    x: Array = wide(signal)
    if x.ndim == 3:
        x = x[..., 0] + 1j * x[..., 1] if x.shape[-1] == 2 else x[..., 0]
    step = int(inputs[1].reshape(()))
    count = _frames(x.shape[1], frame, step)
    pieces = np.lib.stride_tricks.sliding_window_view(x, frame, axis=1)[:, : (count - 1) * step + 1 : step]
    if window is not None:
        if window.size != frame:
            raise ValueError(f"a window of {window.size} for frames of {frame}")
        pieces = pieces * wide(window).reshape(-1)
    spectrum = np.fft.rfft(pieces, axis=-1) if onesided else np.fft.fft(pieces, axis=-1)
    return [narrow(np.stack([spectrum.real, spectrum.imag], -1), signal.dtype)]


def _infer_stft(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = tensor(operands, 0)
    if x.shape is None:
        return [TensorType(x.dtype, (None, None, None, 2))]
    onesided = bool(attrs.get("onesided", 1))
    _check(len(x.shape), x.shape[2] if len(x.shape) == 3 else 1, onesided)
    step, size = value(operands, 1), value(operands, 3)
    frame: Dim = None
    if size is not None:
        frame = int(size.reshape(()))
    elif not given(operands, 3) and given(operands, 2):
        window = tensor(operands, 2)
        frame = window.shape[0] if window.shape is not None and len(window.shape) == 1 else None
    if not isinstance(frame, WHOLE):
        return [TensorType(x.dtype, (x.shape[0], None, None, 2))]
    length, count = x.shape[1], None
    if isinstance(length, WHOLE) and step is not None:
        count = _frames(length, frame, int(step.reshape(())))
    return [TensorType(x.dtype, (x.shape[0], count, frame // 2 + 1 if onesided else frame, 2))]


OPS = (OpSpec("STFT", _stft, _infer_stft),)
