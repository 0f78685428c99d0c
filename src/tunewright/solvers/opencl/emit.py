"""The emitter: C source of one kernel, its arguments, and the launch that results.

A dimension is a name in the text. In a specialised kernel it is a literal (the compiler sees the shape); in a generic
one it is an argument, so that every shape shares one text and a new shape compiles nothing. That is all the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ...ir.types import DType
from .prelude import PRELUDE


@dataclass(frozen=True)
class In:
    """Input number ``index`` of the problem."""

    index: int


@dataclass(frozen=True)
class Out:
    """Output number ``index`` of the problem."""

    index: int = 0


@dataclass(frozen=True)
class Scratch:
    """Memory for the launches of one execution of a kernel; equal ``name`` in several launches is the same.

    The kernels of a request share it: what it holds at the beginning is anything.
    """

    name: str
    nbytes: int


@dataclass(frozen=True, eq=False)
class Table:
    """A constant that the kernel brings along."""

    array: np.ndarray[Any, Any]


Arg: TypeAlias = In | Out | Scratch | Table | np.generic


@dataclass(frozen=True)
class Call:
    """One launch: a kernel in a text, over a grid of work-items, with its arguments in order."""

    text: str
    name: str
    grid: tuple[int, ...]
    args: tuple[Arg, ...]
    #: the text in parts: what stands before the kernel (without the prelude), its parameters, its body
    head: str = ""
    params: tuple[str, ...] = ()
    body: str = ""


#: how an element lies in memory, and in what type it is computed
STORAGE = {
    DType.FLOAT32: "f32", DType.FLOAT64: "f64", DType.FLOAT16: "u16", DType.BFLOAT16: "u16", DType.BOOL: "u8",
    DType.INT8: "i8", DType.UINT8: "u8", DType.INT16: "i16", DType.UINT16: "u16", DType.INT32: "i32",
    DType.UINT32: "u32", DType.INT64: "i64", DType.UINT64: "u64",
}  # fmt: skip
COMPUTE = STORAGE | {DType.FLOAT16: "f32", DType.BFLOAT16: "f32"}
_LOAD = {DType.FLOAT16: "f16_load({})", DType.BFLOAT16: "bf16_load({})"}
_STORE = {DType.FLOAT16: "f16_store({})", DType.BFLOAT16: "bf16_store({})", DType.BOOL: "({}) != 0"}


@dataclass
class Source:
    """A kernel being written. Names of dimensions and constants are in upper case; they are macros or arguments."""

    name: str
    #: dimensions are literals
    specialise: bool = False
    _buffers: dict[str, tuple[DType, Arg]] = field(default_factory=dict)
    _dims: dict[str, int] = field(default_factory=dict)
    _fixed: dict[str, str] = field(default_factory=dict)
    _numbers: dict[str, np.generic] = field(default_factory=dict)
    _functions: list[str] = field(default_factory=list)
    _body: list[str] = field(default_factory=list)

    def buffer(self, name: str, dtype: DType, arg: In | Out | Scratch | Table) -> None:
        """A pointer argument."""
        self._buffers[name] = (dtype, arg)

    def dims(self, **values: int) -> None:
        """Dimensions, strides and offsets: literals when specialised, int arguments otherwise."""
        self._dims.update(values)

    def fixed(self, **values: int | float | str) -> None:
        """What is part of the text in any case: tile sizes, a window's size, flags."""
        self._fixed.update({k: _literal(v) for k, v in values.items()})

    def numbers(self, **values: float) -> None:
        """Float arguments (an epsilon): never literals, since they rarely matter to the compiler."""
        self._numbers.update({k: np.float32(v) for k, v in values.items()})

    def function(self, text: str) -> None:
        """A helper in front of the kernel."""
        if text not in self._functions:
            self._functions.append(text)

    def add(self, text: str) -> None:
        """Lines of the kernel's body."""
        self._body.append(text)

    def load(self, name: str, at: str) -> str:
        """An element of a buffer as an expression of the type it is computed in."""
        return _LOAD.get(self._buffers[name][0], "{}").format(f"{name}[{at}]")

    def store(self, name: str, at: str, value: str) -> str:
        """The statement that writes an element; the value is of the type it is computed in."""
        return f"{name}[{at}] = {_STORE.get(self._buffers[name][0], '{}').format(value)};"

    def compute(self, name: str) -> str:
        """The C type in which elements of a buffer are computed."""
        return COMPUTE[self._buffers[name][0]]

    def call(self, grid: Sequence[int]) -> Call:
        """The finished kernel over a grid of at most three dimensions."""
        params, args = [], []
        for name, (dtype, arg) in self._buffers.items():
            const = "const " if isinstance(arg, In | Table) else ""
            params.append(f"GLOBAL {const}{STORAGE[dtype]}* restrict {name}")
            args.append(arg)
        defines = dict(self._fixed)
        for name, value in self._dims.items():
            if self.specialise:
                defines[name] = _literal(value)
            else:
                params.append(f"const int {name}")
                args.append(np.int32(value))
        for name, number in self._numbers.items():
            params.append(f"const f32 {name}")
            args.append(number)
        head = "\n".join([*(f"#define {k} {v}" for k, v in defines.items()), *self._functions])
        body = "\n".join(self._body)
        text = "\n".join([PRELUDE, head, f"KERNEL {self.name}({', '.join(params)}) {{", body, "}\n"])
        return Call(text, self.name, tuple(grid), tuple(args), head, tuple(params), body)


def _literal(value: int | float | str) -> str:
    if isinstance(value, (int, np.integer)):
        return str(value) if value >= 0 else f"({value})"
    if isinstance(value, float):
        return f"{value!r}f"
    return value
