"""Resize in all modes, plain or with channels last, all axes in one launch.

Source positions and weights come from the reference (`ops.onnx.tensors.resize.taps`), as tables per axis in device
memory. Where the index of a nearest element is a plain quotient, as in detectors that double their maps, no table is
needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue, torch_dtype
from tunewright.ir.types import PLAIN, DType, TensorType
from tunewright.ops.onnx.tensors.resize import Taps, extrapolation, steps, taps
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Missing, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..elementwise.elementwise import why_not_layouts
from ..source import expr, rows
from ..source.compile import is_recording
from ..source.rows import cdiv, indented, power, tensor
from ..source.text import NAMES, chain, computed, load, physical_order, why_not_chain

#: weighted elements of a result that are unrolled
UNROLLED = 16
_FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64})


@dataclass(frozen=True)
class _Axis:
    """An axis of the result: its size, the stride of the input along it, and the taps of its elements."""

    size: int
    step: int
    #: None where each element is the input element of the same index
    found: Taps | None
    source: int

    @cached_property
    def quotient(self) -> bool:
        """Whether element ``o`` is the input element ``o * source // size``."""
        if self.found is None or self.found.weights is not None or self.found.outside is not None:
            return False
        return bool(np.array_equal(self.found.indices[:, 0], np.arange(self.size) * self.source // self.size))

    @property
    def tabled(self) -> bool:
        return self.found is not None and not self.quotient

    @property
    def taps(self) -> int:
        return 1 if self.found is None else self.found.indices.shape[1]

    @property
    def places(self) -> Array:
        """[size, taps]: offset from the start of the input; -1 for elements outside."""
        assert self.found is not None
        there = self.found.indices * self.step
        return there if self.found.outside is None else np.where(self.found.outside[:, None], -1, there)


@dataclass(frozen=True)
class _Shape:
    """The result's axes in memory order, up to the last resized one, and the number of elements behind that axis."""

    axes: tuple[_Axis, ...]
    inner: int

    @property
    def pixels(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @cached_property
    def tables(self) -> tuple[Array, Array | None]:
        """Positions and weights of all axes that need a table, concatenated."""
        found = [axis for axis in self.axes if axis.tabled]
        if not found:
            return np.zeros(1, np.int32), None
        places = np.concatenate([axis.places.reshape(-1) for axis in found]).astype(np.int32)
        if all(axis.found is None or axis.found.weights is None for axis in found):
            return places, None
        weights = [axis.found.weights for axis in found if axis.found is not None]
        return places, np.concatenate([w.reshape(-1) for w in weights if w is not None]).astype(np.float64)


@lru_cache(256)
def _shape(problem: Problem) -> _Shape:
    x, out = tensor(problem.input(0)), tensor(problem.outputs[0])
    roi, scales, sizes = (problem.value(i) if problem.input(i) is not None else None for i in (1, 2, 3))
    found_steps = steps(x.dims, roi, scales, sizes, problem.attrs)
    resized = {step.axis: taps(x.dims[step.axis], step, problem.attrs) for step in found_steps}
    order = physical_order(x, len(x.dims))
    behind = next((n for n in range(len(order), 0, -1) if order[n - 1] in resized), 0)
    found = []
    for n, axis in enumerate(order[:behind]):
        step = math.prod(x.dims[a] for a in order[n + 1 :])
        found.append(_Axis(out.dims[axis], step, resized.get(axis), x.dims[axis]))
    return _Shape(tuple(found), math.prod(x.dims[a] for a in order[behind:]))


class TritonResize(CudaSolver):
    """Resizes any type to the nearest element, and floats by weighted sums."""

    id = "triton.resize"
    ops = frozenset({"Resize"})
    layouts = frozenset({PLAIN.name, "nhwc"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, out = tensor(problem.input(0)), tensor(problem.outputs[0])
        if x.layout != out.layout:
            return "input and output differ in layout"
        for i in (1, 2, 3):
            type = problem.input(i)
            if isinstance(type, TensorType) and type.size and problem.value(i) is None:
                return Missing(f"input {i} is not constant")
        if problem.attrs.get("mode", "nearest") != "nearest" and x.dtype not in _FLOATS:
            return f"takes no weighted sums of {x.dtype}"
        if not x.size or not out.size:
            return "is empty"
        if problem.epilogue:
            reason = why_not_chain(problem, main=False) or why_not_layouts(problem, len(problem.main_inputs))
            if reason is not None:
                return reason
        _shape(problem)  # raises for invalid attributes
        return rows.why_not_size(problem)

    def space(self, problem: Problem, target: Target) -> Space:
        shape = _shape(problem)

        def useful(config: Mapping[str, Any]) -> bool:
            pixels, inner, warps = (int(config[k]) for k in ("pixels", "inner", "warps"))
            if inner > power(shape.inner) or pixels >= 2 * max(shape.pixels, 2):
                return False
            return pixels * inner <= 64 * 32 * warps and (warps == 1 or pixels * inner >= 32 * warps)

        blocks = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
        return Space({"pixels": blocks, "inner": blocks, "warps": [1, 2, 4, 8]}, useful, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        """Eight elements per thread, fewer where they would not occupy every multiprocessor."""
        shape, units = _shape(problem), max(target.units, 1)
        total = 1024
        while total > 128 and cdiv(shape.pixels * shape.inner, total) < 4 * units:
            total //= 2
        inner = min(power(shape.inner), total)
        pixels = min(max(1, total // inner), power(shape.pixels))
        return {"pixels": pixels, "inner": inner, "warps": max(1, min(8, pixels * inner // 256))}

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return _text(problem, _shape(problem), config)

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        shape = _shape(problem)
        kernel, first, warps = load(_text(problem, shape, config)), len(problem.main_inputs), int(config["warps"])
        grid = (cdiv(shape.pixels, int(config["pixels"])), cdiv(shape.inner, int(config["inner"])))
        places, weights = shape.tables
        if weights is not None and tensor(problem.input(0)).dtype is not DType.FLOAT64:
            weights = weights.astype(np.float32)
        tables = [places] if weights is None else [places, weights]
        tables = tables if any(axis.tabled for axis in shape.axes) else []

        def there(queue: CudaQueue, table: Array, like: Any) -> Any:
            if is_recording():
                return like.new_empty(table.shape, dtype=torch_dtype(table.dtype))
            return queue.device.constant(table).tensor

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            given = [there(queue, table, inputs[0]) for table in tables]
            kernel[grid](inputs[0], *given, *inputs[first:], outputs[0], num_warps=warps)

        return call


def _text(problem: Problem, shape: _Shape, config: Mapping[str, Any]) -> str:
    x, out = tensor(problem.input(0)), tensor(problem.outputs[0])
    pixels, inner = int(config["pixels"]), int(config["inner"])
    real, weighted = computed(x.dtype), shape.tables[1] is not None
    lines = [
        f"m = tl.program_id(0) * {pixels} + tl.arange(0, {pixels})",
        f"c = tl.program_id(1) * {inner} + tl.arange(0, {inner})",
        f"here = m < {shape.pixels}", f"inside = here[:, None] & (c < {shape.inner})[None, :]",
    ]  # fmt: skip
    base, behind, first = ["m * 0"], 1, sum(axis.size * axis.taps for axis in shape.axes if axis.tabled)
    numbered: list[tuple[int, _Axis]] = []
    for k, axis in reversed(list(enumerate(shape.axes))):
        index = f"m // {behind} % {axis.size}" if k else f"m // {behind}"
        behind *= axis.size
        if axis.found is None or axis.quotient:
            index = f"({index})" if axis.found is None else f"(({index}) * {axis.source} // {axis.size})"
            base.append(f"{index} * {axis.step}")
            continue
        first -= axis.size * axis.taps
        lines.append(f"a{k} = {first} + ({index}) * {axis.taps}")
        numbered.append((k, axis))
    numbered.reverse()
    lines.append(f"base = {' + '.join(base)}")
    outside = [k for k, axis in numbered if axis.found is not None and axis.found.outside is not None]

    def one(at: Sequence[str], say: str) -> list[str]:
        """Statements for the element that one tap per axis selects. ``say`` is their beginning, such as "made ="."""
        place = " + ".join(["base", *(f"tl.load(places + a{k} + {t}, mask=here, other=0)" for (k, _), t in
                                      zip(numbered, at, strict=True))])  # fmt: skip
        read = f"tl.load(x + ({place})[:, None] + c[None, :], mask={'inside & ok' if outside else 'inside'}, other=0)"
        if not weighted:
            return [f"{say} {read}.to({real})"]
        factors = [f"tl.load(weights + a{k} + {t}, mask=here, other=0.0)" for (k, _), t in
                   zip(numbered, at, strict=True)]  # fmt: skip
        return [f"{say} {read}.to({real}) * ({' * '.join(factors)})[:, None]"]

    if outside:
        tests = " & ".join(f"(tl.load(places + a{k}, mask=here, other=0) >= 0)" for k in outside)
        lines.append(f"ok = ({tests})[:, None] & (c[None, :] >= 0)")
    if not weighted:
        lines += one(["0"] * len(numbered), "made =")
    elif math.prod(axis.taps for _, axis in numbered) <= UNROLLED:
        every = list(product(*(range(axis.taps) for _, axis in numbered)))
        for n, at in enumerate(every):
            lines += one([str(t) for t in at], "made +=" if n else "made =")
    else:
        lines.append(f"made = tl.zeros(({pixels}, {inner}), {real})")
        depth = 0
        for k, axis in numbered:
            lines.append("    " * depth + f"for t{k} in range(0, {axis.taps}):")
            depth += 1
        body = one([f"t{k}" for k, _ in numbered], "made +=")
        for _ in range(depth):
            body = indented(body)
        lines += body
    if outside:
        value = float(extrapolation(problem.attrs, x.dtype.numpy))
        made = expr.number(value) if x.dtype.is_float else str(int(value))
        lines.append(f"made = tl.where(ok, made, {made}).to({real})")
    lines.append(f"spot = m[:, None] * {shape.inner} + c[None, :]")
    chained, last = chain(problem, "made", "spot", "inside", indent="")
    lines += [*chained, f"tl.store(out + spot, ({last}).to({NAMES[out.dtype]}), mask=inside)"]
    operands = [f"p{i}" for i in range(len(problem.main_inputs), len(problem.inputs))]
    tables = (["places"] if numbered else []) + (["weights"] if numbered and weighted else [])
    return rows.kernel(["x", *tables, *operands, "out"], lines)


SOLVERS = (TritonResize(),)
