"""Triton 3.6's interpreter, repaired: two things that kernels do on a GPU and it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def repaired(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loops to where a number in memory says, and products of bfloat16. Import it: it is used by each test then."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    dot = interpreter.InterpreterBuilder.create_dot

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # it makes an int of an array of one element, which numpy 2.4 refuses
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def with_bfloat16(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return dot(self, _single(interpreter, a), _single(interpreter, b), *more)  # it multiplies their bits

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", with_bfloat16)
    yield


def _single(interpreter: Any, handle: Any) -> Any:
    import triton.language as tl

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    data = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(data, tl.float32)
