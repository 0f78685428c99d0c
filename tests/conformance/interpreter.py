"""Where the CUDA kernels of these tests run: in Triton's interpreter, or on a GPU with TUNEWRIGHT_TEST_GPU=1.

Import it before Triton: whether it interprets is decided there. The interpreter of Triton 3.6 is repaired as well: two
things that kernels do on a GPU and it does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

ON_GPU = os.environ.get("TUNEWRIGHT_TEST_GPU") == "1"
RAW = "cuda:0" if ON_GPU else "cpu"  # what a `CudaDevice` of the tests stands for
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # every Triton kernel of this process


@contextmanager
def repaired() -> Iterator[None]:
    """Loops to where a number in memory says, and products of bfloat16."""
    if ON_GPU:
        yield
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    dot = interpreter.InterpreterBuilder.create_dot

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # it makes an int of an array of one element, which numpy 2.4 refuses
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def with_bfloat16(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return dot(self, _single(interpreter, a), _single(interpreter, b), *more)  # it multiplies their bits

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang_tensor", with_index)
        patched.setattr(interpreter.InterpreterBuilder, "create_dot", with_bfloat16)
        yield


def _single(interpreter: Any, handle: Any) -> Any:
    import triton.language as tl

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    data = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(data, tl.float32)
