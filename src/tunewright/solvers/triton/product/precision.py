"""How tensor cores multiply single-precision numbers: exactly, or rounded to fewer digits first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunewright.ir.types import DType, TensorType
from tunewright.search.space import Scalar
from tunewright.solvers.base import Config, Kernel, Problem

#: Triton's names: ieee keeps all digits, tf32x3 takes three products of split factors, tf32 keeps 10 of 23 bits.
PRECISIONS = ("ieee", "tf32x3", "tf32")


def dtype(problem: Problem) -> DType:
    """The type of the factors."""
    x = problem.inputs[0]
    assert isinstance(x, TensorType)
    return x.dtype


def params(dtype: DType) -> dict[str, Sequence[Scalar]]:
    """Additional parameters of a space, for factors of the given type."""
    return {"precision": PRECISIONS} if dtype is DType.FLOAT32 else {}


def default(dtype: DType) -> dict[str, Scalar]:
    """The default precision. It must be exact: EXECUTION_MODE_HINT = ACCURACY must leave a solver its default."""
    return {"precision": "ieee"} if dtype is DType.FLOAT32 else {}


def option(dtype: DType, config: Mapping[str, Any]) -> str:
    """The argument of tl.dot. It is empty for narrow types, whose products are exact in any case."""
    return f', input_precision="{config["precision"]}"' if dtype is DType.FLOAT32 else ""


def is_safe(config: Mapping[str, Any], rows: int, warps: int) -> bool:
    """Whether Triton (3.6) compiles a config for tiles of this number of rows without races.

    For tf32x3, Triton splits factors in registers and writes them to shared memory. It puts the fence that makes them
    visible to tensor cores behind the barrier instead of in front of it. Of two groups of four warps, one may then read
    what the other has written but not yet fenced. Tiles below 64 rows use mma.sync and are safe, and so is a single
    group.
    """
    return config.get("precision") != "tf32x3" or rows < 64 or warps <= 4


def inexact(config: Config) -> str | None:
    """The reason why a config is inexact; see `Solver.inexact`."""
    how = config.get("precision", "ieee")
    if how == "ieee":
        return None
    lost = "to 11 digits" if how == "tf32" else "to twice 11 digits"
    return f"{how}: single-precision factors are rounded {lost} (binary) before they are multiplied"


def marked(kernel: Kernel, config: Config) -> Kernel:
    """Mark a kernel that rounds factors to the digits of float16, so that float16 tolerances apply to it."""
    if config.get("precision") == "tf32":
        kernel.like = DType.FLOAT16
    return kernel


def float32() -> Any:
    """Torch's type of the sums in scratch memory."""
    import torch

    return torch.float32
