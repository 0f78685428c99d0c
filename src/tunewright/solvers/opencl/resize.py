"""Resize in all modes, with constant scales or sizes.

Where each element comes from, and with which weight, is the reference's (`ops.resize.taps`): tables per axis, made on
the host, so that a text knows neither modes nor shapes. Two kernels work on the last one or two resized axes, h and w:
`_lines` where w is the innermost axis (a blend of lines, then of their elements), `_pixels` where elements lie behind
it that stay together: channels of a blocked layout, or the axes behind when another one is resized first.
What inner loops add to is an i64: beside an int that is unknown the compiler does not see that they are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ...devices.base import Target
from ...ir.types import PLAIN, DType
from ...ops.numeric import limits
from ...ops.resize import Step, Taps, extrapolation, steps, taps, working_type
from ...search.space import Config as Point
from ...search.space import Space
from ..base import Array, Config, Missing, Problem, tensor
from .base import CSolver, both, layout_of
from .emit import STORAGE, Call, In, Out, Scratch, Source, Table
from .indices import ONE_WORD, Shares, unfit
from .words import word

#: taps up to this number are written out; more (antialias) are a loop
MOST_TAPS = 4
#: factors for which a line is written without looking up each element
FACTORS = (2, 4)


@dataclass(frozen=True)
class Stage:
    """One launch: axes h (if any) and w of an array [outer, h, w, inner]; from where to where, and in which types."""

    number: int
    outer: int
    h: tuple[int, Taps] | None
    w: tuple[int, Taps]
    inner: int
    source: In | Scratch
    given: DType
    target: Out | Scratch
    made: DType
    #: of weights and sums; for the nearest element, that of the elements themselves
    work: DType
    #: what stands outside, where something does
    fill: Array
    #: sums are rounded to integers in the end: products and sums are rounded one by one, as in the reference
    exact: bool

    @property
    def rows(self) -> tuple[int, int]:
        """Length of h before and after."""
        return (self.h[0], len(self.h[1].indices)) if self.h else (1, 1)

    @property
    def columns(self) -> tuple[int, int]:
        """Length of w before and after."""
        return self.w[0], len(self.w[1].indices)

    @property
    def crop(self) -> bool:
        return any(a is not None and a[1].outside is not None for a in (self.h, self.w))

    @property
    def size(self) -> int:
        """Elements that it makes."""
        return self.outer * self.rows[1] * self.columns[1] * self.inner


class Resize(CSolver):
    """One launch for one or two axes; more axes go through scratch memory, one after the other."""

    family = "resize"
    ops = frozenset({"Resize"})
    dtypes: ClassVar[frozenset[DType]] = ONE_WORD
    layouts = frozenset({PLAIN.name, "blocked"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = unfit(problem, 1)
        if reason is not None:
            return reason
        x = tensor(problem.inputs[0])
        if layout_of(x) != layout_of(problem.outputs[0]):
            return "does not change the layout"
        if problem.attrs.get("mode", "nearest") != "nearest" and (x.dtype not in STORAGE or x.dtype is DType.BOOL):
            return f"does not compute with {x.dtype}"
        crop = problem.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
        for i, name in ((1, "roi"), (2, "scales"), (3, "sizes")):
            if problem.input(i) is not None and problem.value(i) is None and (crop or i > 1):
                return Missing(f"{name} is not constant")
        if not problem.is_static:
            return None
        try:
            found = _steps(problem)
        except ValueError as error:
            return str(error)
        if layout_of(x) != PLAIN and any(step.axis < 2 for step in found):
            return "resizes the channels of a blocked layout"
        if not x.size and tensor(problem.outputs[0]).size:
            return "there is nothing to sample"
        return None

    def default(self, problem: Problem, target: Target) -> Config:
        return Point(slice=65536)

    def space(self, problem: Problem, target: Target) -> Space:
        """``slice``: bytes of the result that a work-item makes at least."""
        return Space({"slice": (16384, 65536, 262144)})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[Call]:
        if not tensor(problem.outputs[0]).size:
            return []
        return [
            (_lines if stage.inner == 1 else _pixels)(stage, config["slice"], target, self.specialise)
            for stage in _stages(problem)
        ]


def _steps(problem: Problem) -> list[Step]:
    x = tensor(problem.inputs[0])
    return steps(x.dims, problem.value(1), problem.value(2), problem.value(3), problem.attrs)


def _stages(problem: Problem) -> list[Stage]:
    """Axis after axis; the last two that are neighbours in one, unless that makes many taps of few.

    Integers are rounded at the end, where the last bit of a sum may decide: they keep to the order of the reference.
    """
    x = tensor(problem.inputs[0])
    attrs, dims = problem.attrs, [*x.physical] or [1]
    nearest = attrs.get("mode", "nearest") == "nearest"
    work = word(x.dtype) if nearest else DType.of_numpy(working_type(x.dtype.numpy))
    edge = word(x.dtype) if nearest else x.dtype
    fill = extrapolation(attrs, x.dtype.numpy if nearest else work.numpy).reshape(1).view(work.numpy)
    found = {step.axis: (dims[step.axis], taps(dims[step.axis], step, attrs)) for step in _steps(problem)}
    if not found:  # a copy
        axis = len(dims) - 1
        found = {axis: (dims[axis], Taps(np.arange(dims[axis])[:, None], None, None))}
    order = [*found]
    exact = x.dtype.is_integer and not nearest
    last = max(order)
    pair = not exact and last - 1 in order
    if pair and last < len(dims) - 1:
        pair = math.prod(found[a][1].indices.shape[1] for a in (last - 1, last)) <= MOST_TAPS
    if pair:
        groups = [(a,) for a in order if a < last - 1] + [(last - 1, last)]
    else:
        groups = [(a,) for a in order]
    stages: list[Stage] = []
    for n, group in enumerate(groups):
        source: In | Scratch = In(0) if n == 0 else _between(stages[-1])
        first, last = group[0], group[-1]
        h = found[first] if len(group) == 2 else None
        stage = Stage(
            n, math.prod(dims[:first]), h, found[last], math.prod(dims[last + 1 :]),
            source, edge if n == 0 else work, Out(), edge, work, fill, exact,
        )  # fmt: skip
        if n < len(groups) - 1:
            stage = replace(stage, target=_between(stage), made=work)
        for a in group:
            dims[a] = len(found[a][1].indices)
        stages.append(stage)
    return stages


def _between(stage: Stage) -> Scratch:
    """What a stage leaves to the next one."""
    return Scratch(f"between{stage.number}", stage.size * stage.work.itemsize)


# -- texts ------------------------------------------------------------------------------------------------------------
class _Text:
    """A kernel's source with the buffers and tables of a stage."""

    def __init__(self, name: str, stage: Stage, specialise: bool) -> None:
        self.stage, self.source = stage, Source(name, specialise)
        source = self.source
        source.buffer("x", stage.given, stage.source)
        if stage.h is not None:
            self._tables("h", stage.h[1], False)
        self._tables("w", stage.w[1], True)
        if stage.crop:
            source.buffer("fill", stage.work, Table(stage.fill))
        source.buffer("y", stage.made, stage.target)
        source.dims(H=stage.rows[0], OH=stage.rows[1], W=stage.columns[0], OW=stage.columns[1])
        source.fixed(T=STORAGE[stage.work])
        if stage.exact:
            source.add('_Pragma("clang fp contract(off)")')

    def _tables(self, axis: str, found: Taps, by_tap: bool) -> None:
        """``hs``, ``hw``: indices and weights, [out, taps] along h, [taps, out] along w; ``ho``: what is outside."""
        source, count = self.source, found.indices.shape[1]

        def ordered(array: Array, dtype: DType) -> Table:
            return Table(np.ascontiguousarray(array.T if by_tap else array, dtype.numpy))

        source.buffer(f"{axis}s", DType.INT32, ordered(found.indices, DType.INT32))
        if found.weights is not None:
            source.buffer(f"{axis}w", self.stage.work, ordered(found.weights, self.stage.work))
        if self.stage.crop:
            outside = np.zeros(len(found.indices), np.bool_) if found.outside is None else found.outside
            source.buffer(f"{axis}o", DType.UINT8, Table(outside.astype(np.uint8)))
        name = f"{axis.upper()}TAPS"
        if count > MOST_TAPS:
            source.dims(**{name: count})
        else:
            source.fixed(**{name: count})

    def count(self, axis: str) -> int | None:
        """Taps along an axis: 0 where there are no weights, None where they are a loop."""
        found = self.stage.h if axis == "h" else self.stage.w
        if found is None or found[1].weights is None:
            return 0
        count = found[1].indices.shape[1]
        return count if count <= MOST_TAPS else None

    def load(self, at: str) -> str:
        """An element of the input, in the type of the work."""
        return f"(T){self.source.load('x', at)}"

    def store(self, at: str, value: str) -> str:
        """The statement that stores a result."""
        stage = self.stage
        if stage.made.is_integer and stage.w[1].weights is not None:
            low, high = limits(stage.made.numpy)
            f = "f" if stage.work is DType.FLOAT32 else ""
            return (
                f"{{ T whole = __builtin_rint{f}({value}); whole = whole < {low}.0{f} ? {low}.0{f} : whole; "
                f"whole = whole > {high}.0{f} ? {high}.0{f} : whole; {self.source.store('y', at, 'whole')} }}"
            )
        return self.source.store("y", at, value)


def _sum(terms: Sequence[str]) -> str:
    return " + ".join(terms)


def _factor(found: Taps, size: int) -> tuple[int, int, int]:
    """(factor, first, last): between these input elements, output = factor * input + phase, alike for all of them.

    A factor of 0 says that there is none.
    """
    out, count = found.indices.shape
    for factor in FACTORS:
        if out != factor * size or count > MOST_TAPS or size < 16:
            continue
        offset = found.indices.reshape(size, factor, count) - np.arange(size)[:, None, None]
        alike = (offset == offset[size // 2]).all((1, 2))
        if found.weights is not None:
            weights = found.weights.reshape(size, factor, count)
            alike &= (weights == weights[size // 2]).all((1, 2))
        others = np.flatnonzero(~alike)
        first = int(others[others < size // 2].max(initial=-1)) + 1
        last = int(others[others > size // 2].min(initial=size))
        if 2 * (last - first) > size:
            return factor, first, last
    return 0, 0, 0


def _lines(stage: Stage, slice: int, target: Target, specialise: bool) -> Call:
    """w is innermost: for each row of the result a line, blended from those of the input, then its elements."""
    text = _Text("resize_lines", stage, specialise)
    source, width = text.source, stage.columns[0]
    rows = stage.outer * stage.rows[1]
    shares = Shares.of(rows, 1, stage.columns[1] * stage.made.itemsize, target, slice)
    source.dims(ROWS=rows, SHARE=shares.rows)
    blend, across = text.count("h"), text.count("w")
    if blend != 0:
        nbytes = shares.grid[0] * width * stage.work.itemsize
        source.buffer("lines", stage.work, Scratch(f"lines{stage.number}", nbytes))
        source.add("GLOBAL T* line = lines + GID(0) * W;")
    source.add("int begin = GID(0) * SHARE, end = begin + SHARE < ROWS ? begin + SHARE : ROWS;")
    source.add("for (int r = begin; r < end; r++) {")
    source.add("int h UNUSED = r % OH;\ni64 from = r / OH * H * W, to = r * OW;")
    if stage.crop and stage.h is not None:
        source.add(f"if (ho[h]) {{ for (int j = 0; j < OW; j++) {text.store('to + j', 'fill[0]')} continue; }}")
    if blend is None:
        source.add("for (int j = 0; j < W; j++) line[j] = 0;")
        source.add("for (int t = 0; t < HTAPS; t++) {")
        source.add("i64 at = from + hs[h * HTAPS + t] * W; T weight = hw[h * HTAPS + t];")
        source.add(f"for (int j = 0; j < W; j++) line[j] += {text.load('at + j')} * weight; }}")
    elif blend:
        for t in range(blend):
            source.add(f"i64 at{t} = from + hs[h * HTAPS + {t}] * W; T weight{t} = hw[h * HTAPS + {t}];")
        terms = [f"{text.load(f'at{t} + j')} * weight{t}" for t in range(blend)]
        source.add(f"for (int j = 0; j < W; j++) line[j] = {_sum(terms)};")
    elif stage.h is not None:
        source.add("from += hs[h] * W;")

    def at(index: str) -> str:
        return f"line[{index}]" if blend != 0 else text.load(f"from + {index}")

    factor, first, last = _factor(stage.w[1], width)
    source.fixed(FACTOR=factor)
    ends = "for (int j = 0; j < OW; j++) {"
    if factor:
        source.dims(FIRST=first, LAST=last)
        ends = "for (int j = 0; j < OW; j++) {\nif (j == FIRST * FACTOR) j = LAST * FACTOR;\nif (j == OW) break;"
        values = []
        for p in range(factor):
            if not across:
                source.add(f"int s{p} = ws[FIRST * FACTOR + {p}] - FIRST;")
                values.append(at(f"s{p} + i"))
                continue
            for t in range(across):
                place = f"{t} * OW + FIRST * FACTOR + {p}"
                source.add(f"int s{p}{t} = ws[{place}] - FIRST; T w{p}{t} = ww[{place}];")
            values.append(_sum([f"{at(f's{p}{t} + i')} * w{p}{t}" for t in range(across)]))
        source.add("for (int i = FIRST; i < LAST; i++) {")
        for p, value in enumerate(values):
            source.add(f"T v{p} = {value};")
        for p in range(factor):
            source.add(text.store(f"to + i * FACTOR + {p}", f"v{p}"))
        source.add("}")
    source.add(ends)
    if across is None:
        source.add(f"T v = {at('ws[j]')} * ww[j];")
        source.add(f"for (int t = 1; t < WTAPS; t++) v += {at('ws[t * OW + j]')} * ww[t * OW + j];")
    elif across:
        places = [f"{t} * OW + j" for t in range(across)]
        source.add(f"T v = {_sum([at(f'ws[{p}]') + f' * ww[{p}]' for p in places])};")
    else:
        source.add(f"T v = {at('ws[j]')};")
    if stage.crop:
        source.add("v = wo[j] ? fill[0] : v;")
    source.add(text.store("to + j", "v") + "\n}\n}")
    return source.call(shares.grid[:1])


def _pixels(stage: Stage, slice: int, target: Target, specialise: bool) -> Call:
    """Elements behind w stay together: each pixel of the result is a blend of whole pixels."""
    text = _Text("resize_pixels", stage, specialise)
    source, inner = text.source, stage.inner
    pixels = stage.outer * stage.rows[1] * stage.columns[1]
    shares = Shares.of(pixels, inner, stage.made.itemsize, target, slice)
    source.dims(PIXELS=pixels, SHARE=shares.rows, INNER=inner, PIECE=shares.columns)
    blend, across = text.count("h"), text.count("w")
    loop = blend is None or across is None
    if loop:
        nbytes = math.prod(shares.grid) * shares.columns * stage.work.itemsize
        source.buffer("sums", stage.work, Scratch(f"sums{stage.number}", nbytes))
        source.dims(GRID=shares.grid[0])
        source.add("GLOBAL T* sum = sums + (GID(1) * GRID + GID(0)) * PIECE;")
    source.add("""
int begin = GID(0) * SHARE, end = begin + SHARE < PIXELS ? begin + SHARE : PIXELS;
int first = GID(1) * PIECE, count = INNER - first < PIECE ? INNER - first : PIECE;
for (int p = begin; p < end;) {
int w = p % OW, h UNUSED = p / OW % OH;
i64 from = p / OW / OH * H * W * INNER + first;
int stop = p - w + OW < end ? p - w + OW : end;""")
    if stage.h is not None and not loop:
        for a in range(blend or 1):
            source.add(f"i64 row{a} = from + hs[h * HTAPS + {a}] * W * INNER;")
            if blend:
                source.add(f"T a{a} = hw[h * HTAPS + {a}];")
    elif not loop:
        source.add("i64 row0 = from;")
    source.add("for (; p < stop; p++, w++) {\ni64 to = p * INNER + first;")
    if stage.crop:
        outside = "wo[w]" if stage.h is None else "ho[h] || wo[w]"
        source.add(f"if ({outside}) {{ for (int l = 0; l < count; l++) {text.store('to + l', 'fill[0]')} continue; }}")
    if loop:
        _pixel_loop(text)
    else:
        _pixel(text, blend or 0, across or 0)
    source.add("}\n}")
    return source.call(shares.grid)


def _pixel(text: _Text, blend: int, across: int) -> None:
    """One pixel, its taps written out."""
    source, terms = text.source, []
    for a in range(blend or 1):
        for b in range(across or 1):
            source.add(f"i64 at{a}{b} = row{a} + ws[{b} * OW + w] * INNER;")
            if blend and across:
                source.add(f"T c{a}{b} = a{a} * ww[{b} * OW + w];")
            elif across:
                source.add(f"T c{a}{b} = ww[{b} * OW + w];")
            value = text.load(f"at{a}{b} + l")
            terms.append(f"{value} * c{a}{b}" if across else value)
    source.add(f"for (int l = 0; l < count; l++) {{ T v = {_sum(terms)}; {text.store('to + l', 'v')} }}")


def _pixel_loop(text: _Text) -> None:
    """One pixel, its taps in a loop; their sum is kept in memory, so that what stays together is vectorised."""
    source, two = text.source, text.stage.h is not None
    source.add("for (int l = 0; l < count; l++) sum[l] = 0;")
    if two:
        source.add("for (int a = 0; a < HTAPS; a++)")
    source.add("for (int b = 0; b < WTAPS; b++) {")
    row = "hs[h * HTAPS + a] * W + " if two else ""
    source.add(f"i64 at = from + ({row}ws[b * OW + w]) * INNER;")
    source.add(f"T weight = {'hw[h * HTAPS + a] * ' if two else ''}ww[b * OW + w];")
    source.add(f"for (int l = 0; l < count; l++) sum[l] += {text.load('at + l')} * weight;\n}}")
    source.add(f"for (int l = 0; l < count; l++) {text.store('to + l', 'sum[l]')}")


SOLVERS = both(Resize)
