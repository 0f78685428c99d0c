"""The emitter: C source of one kernel, its arguments, and the resulting launch.

A dimension is a name in the text. In a specialised kernel it is a literal (the compiler sees the shape). In a generic
one it is an argument, so that every shape shares one text and a new shape compiles nothing. There is no other
difference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tunewright.devices import c_kernel
from tunewright.devices.c_kernel import Arg as Arg
from tunewright.devices.c_kernel import ConstantTable as ConstantTable
from tunewright.devices.c_kernel import In as In
from tunewright.devices.c_kernel import Out as Out
from tunewright.devices.c_kernel import ReportArgument as ReportArgument
from tunewright.devices.c_kernel import Scratch as Scratch
from tunewright.ir.symbolic import SymInt
from tunewright.ir.types import DType

from .prelude import PRELUDES


class EmittedLaunch(c_kernel.CLaunchCall):
    """A launch whose text does not depend on a dialect."""

    def program(self, dialect: str) -> str:
        return _PROGRAMS[dialect](self)


def _opencl(call: EmittedLaunch) -> str:
    group = f"__attribute__((reqd_work_group_size({call.group}, 1, 1)))"
    head = f"__kernel {group} void {call.name}({_params(call.params)}) {{"
    return "\n".join([PRELUDES["opencl"], call.head, head, call.body, "}\n"])


def _params(params: Sequence[str]) -> str:
    """The parameters of a function, marked UNUSED, because the text may name them only between #if and #endif."""
    return ", ".join(f"{param} UNUSED" for param in params)


def _c(call: EmittedLaunch) -> str:
    """A C function of a work-item, and an exported one that runs it over a range of a grid, with arguments from a
    table."""
    args = []
    for at, param in enumerate(call.params):
        value = f"arguments[{at}]"
        if "*" in param:
            args.append(f"({param.rpartition('*')[0].replace('restrict', '').strip()}*){value}")
        else:
            args.append(f"as_f32((u32){value})" if "f32" in param else f"(int){value}")
    item = ", ".join(["work_item % work_x", "work_item / work_x % work_y", "work_item / work_x / work_y", *args])
    params = _params(["const int g0", "const int g1", "const int g2", *call.params])
    return "\n".join(
        [
            PRELUDES["c"], call.head, f"static void {call.name}_item({params}) {{", call.body, "}",
            f"EXPORT void {call.name}(const u64* arguments, int work_item, int work_end, int work_x, int work_y) {{",
            f"  for (; work_item < work_end; work_item++) {call.name}_item({item});", "}\n",
        ]
    )  # fmt: skip


_PROGRAMS = {"c": _c, "opencl": _opencl}


#: STORAGE: the C type of an element in memory; COMPUTE: the one in which kernels compute it
STORAGE = {
    DType.FLOAT32: "f32", DType.FLOAT64: "f64", DType.FLOAT16: "u16", DType.BFLOAT16: "u16", DType.BOOL: "u8",
    DType.INT8: "i8", DType.UINT8: "u8", DType.INT16: "i16", DType.UINT16: "u16", DType.INT32: "i32",
    DType.UINT32: "u32", DType.INT64: "i64", DType.UINT64: "u64",
}  # fmt: skip
COMPUTE = STORAGE | {DType.FLOAT16: "f32", DType.BFLOAT16: "f32"}
_LOAD = {DType.FLOAT16: "f16_load({})", DType.BFLOAT16: "bf16_load({})"}
_STORE = {DType.FLOAT16: "f16_store({})", DType.BFLOAT16: "bf16_store({})", DType.BOOL: "({}) != 0"}


#: The name of the report of wrong inputs in a kernel's text; a text that contains it has the report as an argument.
REPORT = "report"
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass
class Source:
    """A kernel's source under construction.

    Names of dimensions and constants are in upper case; they are macros or arguments.
    """

    name: str
    #: whether dimensions are literals
    specialise: bool = False
    _buffers: dict[str, tuple[DType, Arg]] = field(default_factory=dict)
    _dims: dict[str, int] = field(default_factory=dict)
    _fixed: dict[str, str] = field(default_factory=dict)
    _numbers: dict[str, np.generic] = field(default_factory=dict)
    _functions: list[str] = field(default_factory=list)
    _body: list[str] = field(default_factory=list)

    def buffer(self, name: str, dtype: DType, arg: In | Out | Scratch | ConstantTable) -> None:
        """Add a pointer argument."""
        self._buffers[name] = (dtype, arg)

    def dims(self, **values: int) -> None:
        """Add dimensions, strides and offsets: literals when specialised, int arguments otherwise."""
        self._dims.update(values)

    def fixed(self, **values: int | float | str) -> None:
        """Add literals that both kinds of kernel have: tile sizes, a window's size, flags."""
        self._fixed.update({k: _literal(v) for k, v in values.items()})

    def numbers(self, **values: float) -> None:
        """Add float arguments (an epsilon): never literals, since they rarely matter to the compiler."""
        self._numbers.update({k: np.float32(v) for k, v in values.items()})

    def function(self, text: str) -> None:
        """Add a helper function in front of the kernel."""
        if text not in self._functions:
            self._functions.append(text)

    def add(self, text: str) -> None:
        """Add lines to the kernel's body."""
        self._body.append(text)

    def load(self, name: str, at: str) -> str:
        """An element of a buffer as an expression of the type it is computed in."""
        return _LOAD.get(self._buffers[name][0], "{}").format(f"{name}[{at}]")

    def store(self, name: str, at: str, value: str) -> str:
        """The statement that writes an element; the value is of the type it is computed in."""
        return f"{name}[{at}] = {_STORE.get(self._buffers[name][0], '{}').format(value)};"

    def dtype(self, name: str) -> DType:
        """The element type of a buffer."""
        return self._buffers[name][0]

    def compute(self, name: str) -> str:
        """The C type in which elements of a buffer are computed."""
        return COMPUTE[self._buffers[name][0]]

    def call(self, grid: Sequence[int]) -> EmittedLaunch:
        """The finished kernel over a grid of up to three dimensions. Arguments that no text names are omitted."""
        params, args = [], []
        named = set(_WORD.findall("\n".join([*self._fixed.values(), *self._functions, *self._body])))
        for name, (dtype, arg) in self._buffers.items():
            if name not in named:
                continue
            const = "const " if isinstance(arg, In | ConstantTable) else ""
            params.append(f"GLOBAL {const}{STORAGE[dtype]}* restrict {name}")
            args.append(arg)
        defines = dict(self._fixed)
        for name, value in self._dims.items():
            if self.specialise:
                defines[name] = _literal(value)
            elif name in named:
                params.append(f"const int {name}")
                args.append(value if isinstance(value, SymInt) else np.int32(value))
        for name, number in self._numbers.items():
            if name not in named:
                continue
            params.append(f"const f32 {name}")
            args.append(number)
        if REPORT in named:
            params.append(f"GLOBAL i64* restrict {REPORT}")
            args.append(ReportArgument())
        head = "\n".join([*(f"#define {k} {v}" for k, v in defines.items()), *self._functions])
        body = "\n".join(self._body)
        return EmittedLaunch(self.name, tuple(grid), tuple(args), head, tuple(params), body)


def _literal(value: int | float | str) -> str:
    if isinstance(value, SymInt):
        value = int(value)
    if isinstance(value, (int, np.integer)):
        return str(value) if value >= 0 else f"({value})"
    if isinstance(value, float):
        return f"{value!r}f"
    return value
