"""Resize in all modes, with constant scales or sizes.

The reference (`ops.onnx.tensors.resize.taps`) decides the source positions and weights of each element. They become
tables per axis, made on the host, so that a text depends on neither modes nor shapes. Where an axis becomes a power of
two times as long, tables of one period suffice (`ops.onnx.tensors.resize.Period`), and the kernel serves any length.
Where another size determines the new length, each request makes the tables of its lengths.

Two kernels work on the last one or two resized axes, h and w. `_lines` serves a w that is the innermost axis: it blends
lines, then their elements. `_pixels` serves a w with elements behind it that stay together: channels of a blocked
layout, or the following axes when another axis is resized first. Offsets of inner loops are i64: with an int of unknown
value the compiler does not see that the elements are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import SymInt, greater, hint, lesser
from tunewright.ir.types import PLAIN, DType
from tunewright.ops.base import Attrs
from tunewright.ops.numeric import limits
from tunewright.ops.onnx.tensors.resize import (
    Period,
    ResizeStep,
    Taps,
    extrapolation,
    period,
    steps,
    taps,
    working_type,
)
from tunewright.ops.symbolic import pinned
from tunewright.search.space import Config as Point
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Missing, Problem, tensor

from ..source.base import CSolver, both, layout_of
from ..source.element_words import word
from ..source.emit import STORAGE, ConstantTable, EmittedLaunch, In, Out, Scratch, Source
from ..source.indices import ONE_WORD, Shares, unfit

#: Up to this number, taps are written out; more (antialias) are a loop.
MOST_TAPS = 4
#: Factors for which a line needs no look-up of each element; and the least length of such a line.
FACTORS, _SHORT = (2, 4), 16


@dataclass(frozen=True)
class ResizeAxis:
    """A resized axis: its lengths before and after, and the taps of its elements."""

    size: int
    out: int
    #: the taps for the lengths at hand, where these are open
    found: Taps | Period
    #: computes ``found`` from other lengths
    make: Callable[[int, int], Taps] | None = None

    @property
    def indices(self) -> Array:
        """The table of indices, or of those within a period, with a row for each element."""
        return self.found.offsets if isinstance(self.found, Period) else self.found.indices

    @property
    def taps(self) -> int:
        return int(self.indices.shape[1])

    @property
    def outside(self) -> Array | None:
        return None if isinstance(self.found, Period) else self.found.outside


@dataclass(frozen=True)
class ResizeStage:
    """One launch: axes h (if any) and w of an array [outer, h, w, inner], with source, target and types."""

    number: int
    outer: int
    h: ResizeAxis | None
    w: ResizeAxis
    inner: int
    source: In | Scratch
    given: DType
    target: Out | Scratch
    made: DType
    #: the type of weights and sums; for the nearest element, the type of the elements
    work: DType
    #: the value outside of the input, where it is used
    fill: Array
    #: Whether the final sums are rounded to integers: then products and sums are rounded one by one, as in the
    #: reference.
    exact: bool

    @property
    def rows(self) -> tuple[int, int]:
        """Length of h before and after."""
        return (self.h.size, self.h.out) if self.h else (1, 1)

    @property
    def columns(self) -> tuple[int, int]:
        """Length of w before and after."""
        return self.w.size, self.w.out

    @property
    def crop(self) -> bool:
        return any(a is not None and a.outside is not None for a in (self.h, self.w))

    @property
    def size(self) -> int:
        """The number of elements of the result."""
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
        """``slice``: the least bytes of the result that a work-item computes."""
        return Space({"slice": (16384, 65536, 262144)})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        if not tensor(problem.outputs[0]).size:
            return []
        return [
            (_lines if stage.inner == 1 else _pixels)(stage, config["slice"], target, self.specialise)
            for stage in _stages(problem)
        ]


def _steps(problem: Problem, is_pinned: bool = False) -> list[ResizeStep]:
    dims, given = tensor(problem.inputs[0]).dims, [problem.value(i) for i in (1, 2, 3)]
    if is_pinned:
        dims, given = tuple(map(int, dims)), [None if array is None else pinned(array) for array in given]
    roi, scales, sizes = given
    return steps(dims, roi, scales, sizes, problem.attrs)


def _stages(problem: Problem, is_pinned: bool = False) -> list[ResizeStage]:
    """The stages of a problem: one per axis, but the last two share one if they are adjacent and have few taps
    together.

    Integers are rounded at the end, where the last bit of a sum may decide; their stages keep the order of the
    reference. ``is_pinned``: the stages hold only for the lengths at hand. That is needed where the order depends on
    the lengths.
    """
    x = tensor(problem.inputs[0])
    attrs, dims = problem.attrs, [*(map(int, x.physical) if is_pinned else x.physical)] or [1]
    nearest = attrs.get("mode", "nearest") == "nearest"
    work = word(x.dtype) if nearest else DType.of_numpy(working_type(x.dtype.numpy))
    edge = word(x.dtype) if nearest else x.dtype
    fill = extrapolation(attrs, x.dtype.numpy if nearest else work.numpy).reshape(1).view(work.numpy)
    found = {step.axis: _axis(dims[step.axis], step, attrs) for step in _steps(problem, is_pinned)}
    if not found:  # a copy
        axis = len(dims) - 1
        found = {axis: ResizeAxis(dims[axis], dims[axis], Period(1, np.zeros((1, 1), np.int64), None))}
    order = [*found]
    exact = x.dtype.is_integer and not nearest
    last = max(order)
    pair = not exact and last - 1 in order
    if pair and last < len(dims) - 1:
        pair = math.prod(found[a].taps for a in (last - 1, last)) <= MOST_TAPS
    if pair:
        groups = [(a,) for a in order if a < last - 1] + [(last - 1, last)]
    else:
        groups = [(a,) for a in order]
    if len(groups) > 1 and any(axis.make is not None for axis in found.values()):
        return _stages(problem, is_pinned=True)
    stages: list[ResizeStage] = []
    for n, group in enumerate(groups):
        source: In | Scratch = In(0) if n == 0 else _between(stages[-1])
        first, last = group[0], group[-1]
        h = found[first] if len(group) == 2 else None
        stage = ResizeStage(
            n, math.prod(dims[:first]), h, found[last], math.prod(dims[last + 1 :]),
            source, edge if n == 0 else work, Out(), edge, work, fill, exact,
        )  # fmt: skip
        if n < len(groups) - 1:
            stage = replace(stage, target=_between(stage), made=work)
        for a in group:
            dims[a] = found[a].out
        stages.append(stage)
    return stages


def _axis(size: int, step: ResizeStep, attrs: Attrs) -> ResizeAxis:
    repeated = period(size, step, attrs)
    if repeated is not None:
        return ResizeAxis(size, step.out, repeated)

    @lru_cache(maxsize=1)  # indices and weights are asked for one after the other
    def made(size: int, out: int) -> Taps:
        scale = out / size if math.isnan(step.scale) else step.scale
        return taps(size, replace(step, out=out, scale=scale), attrs)

    is_open = isinstance(size, SymInt) or isinstance(step.out, SymInt)
    varies = attrs.get("antialias", 0) or attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    if is_open and not varies:  # The number of taps is the same for all lengths.
        return ResizeAxis(size, step.out, made(hint(size), hint(step.out)), made)
    return ResizeAxis(int(size), int(step.out), made(int(size), int(step.out)))


def _between(stage: ResizeStage) -> Scratch:
    """The memory that passes the result of a stage to the next one."""
    return Scratch(f"between{stage.number}", stage.size * stage.work.itemsize)


# -- texts ------------------------------------------------------------------------------------------------------------
class _Text:
    """A kernel's source with the buffers and tables of a stage."""

    def __init__(self, name: str, stage: ResizeStage, specialise: bool) -> None:
        self.stage, self.source = stage, Source(name, specialise)
        source = self.source
        source.buffer("x", stage.given, stage.source)
        if stage.h is not None:
            self._tables("h", stage.h)
        self._tables("w", stage.w)
        if stage.crop:
            source.buffer("fill", stage.work, ConstantTable(stage.fill))
        source.buffer("y", stage.made, stage.target)
        source.dims(H=stage.rows[0], OH=stage.rows[1], W=stage.columns[0], OW=stage.columns[1])
        source.fixed(T=STORAGE[stage.work])
        if stage.exact:
            source.add('_Pragma("clang fp contract(off)")')

    def _tables(self, name: str, axis: ResizeAxis) -> None:
        """Declares ``hs``, ``hw``: indices and weights, [out, taps] along h, [taps, out] along w, or those of a period.

        ``ho`` marks the elements outside.
        """
        source, found, work = self.source, axis.found, self.stage.work
        by_tap = name == "w" and isinstance(found, Taps)

        def ordered(array: Array | None, dtype: DType) -> Array:
            assert array is not None
            return np.ascontiguousarray(array.T if by_tap else array, dtype.numpy)

        make, lengths = axis.make, (axis.size, axis.out)
        if make is None:
            indices = ConstantTable(ordered(axis.indices, DType.INT32))
        else:
            indices = ConstantTable.of(lambda size, out: ordered(make(size, out).indices, DType.INT32), lengths)
        source.buffer(f"{name}s", DType.INT32, indices)
        if found.weights is not None and make is None:
            source.buffer(f"{name}w", work, ConstantTable(ordered(found.weights, work)))
        elif make is not None and found.weights is not None:
            weights = ConstantTable.of(lambda size, out: ordered(make(size, out).weights, work), lengths)
            source.buffer(f"{name}w", work, weights)
        if self.stage.crop:
            outside = np.zeros(axis.out, np.bool_) if axis.outside is None else axis.outside
            source.buffer(f"{name}o", DType.UINT8, ConstantTable(outside.astype(np.uint8)))
        letter = name.upper()
        if axis.taps > MOST_TAPS:
            source.dims(**{f"{letter}TAPS": axis.taps})
        else:
            source.fixed(**{f"{letter}TAPS": axis.taps})
        if isinstance(found, Period):
            source.fixed(**{f"{letter}PERIOD": found.factor})
            source.function(_WITHIN)

    def index(self, name: str, at: str, tap: int | str) -> str:
        """The expression of the position of a tap of element ``at`` of an axis."""
        if not self._is_periodic(name):
            return f"{name}s[{_entry(name, at, tap)}]"
        letter = name.upper()
        offset = f"{name}s[{at} % {letter}PERIOD * {letter}TAPS + {tap}]"
        return f"within({at} / {letter}PERIOD + {offset}, {letter})"

    def weight(self, name: str, at: str, tap: int | str) -> str:
        """The expression of the weight of a tap of element ``at`` of an axis."""
        letter = name.upper()
        entry = f"{at} % {letter}PERIOD * {letter}TAPS + {tap}" if self._is_periodic(name) else _entry(name, at, tap)
        return f"{name}w[{entry}]"

    def _is_periodic(self, name: str) -> bool:
        axis = self.stage.h if name == "h" else self.stage.w
        return axis is not None and isinstance(axis.found, Period)

    def count(self, axis: str) -> int | None:
        """The number of taps along an axis: 0 where there are no weights, None where they are a loop."""
        resized = self.stage.h if axis == "h" else self.stage.w
        if resized is None or resized.found.weights is None:
            return 0
        return resized.taps if resized.taps <= MOST_TAPS else None

    def load(self, at: str) -> str:
        """The expression of an element of the input, in the type of the arithmetic."""
        return f"(T){self.source.load('x', at)}"

    def store(self, at: str, value: str) -> str:
        """The statement that stores a result."""
        stage = self.stage
        if stage.made.is_integer and stage.w.found.weights is not None:
            low, high = limits(stage.made.numpy)
            f = "f" if stage.work is DType.FLOAT32 else ""
            return (
                f"{{ T whole = __builtin_rint{f}({value}); whole = whole < {low}.0{f} ? {low}.0{f} : whole; "
                f"whole = whole > {high}.0{f} ? {high}.0{f} : whole; {self.source.store('y', at, 'whole')} }}"
            )
        return self.source.store("y", at, value)


_WITHIN = "INLINE int within(int i, int n) { return i < 0 ? 0 : i < n ? i : n - 1; }"


def _entry(name: str, at: str, tap: int | str) -> str:
    """The index of a tap of an element in a table: that of h is ordered by elements, that of w by taps."""
    return f"{at} * HTAPS + {tap}" if name == "h" else f"{tap} * OW + {at}"


def _sum(terms: Sequence[str]) -> str:
    return " + ".join(terms)


def _factor(axis: ResizeAxis) -> tuple[int, int, int]:
    """(factor, first, last): between these input elements, output = factor * input + phase, with equal taps for each
    phase.

    A factor of 0 means that there is none.
    """
    size, found = axis.size, axis.found
    if axis.make is not None:
        return 0, 0, 0
    if isinstance(found, Period):
        if found.factor not in FACTORS or axis.taps > MOST_TAPS:
            return 0, 0, 0
        first = lesser(max(0, -int(found.offsets.min())), size)
        return found.factor, first, greater(first, size - max(0, int(found.offsets.max())))
    out, count = found.indices.shape
    for factor in FACTORS:
        if out != factor * size or count > MOST_TAPS or size < _SHORT:
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


def _lines(stage: ResizeStage, slice: int, target: Target, specialise: bool) -> EmittedLaunch:
    """The launch for w innermost: for each row of the result, it blends a line from input lines, then its elements."""
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
        source.add(f"i64 at = from + {text.index('h', 'h', 't')} * W; T weight = {text.weight('h', 'h', 't')};")
        source.add(f"for (int j = 0; j < W; j++) line[j] += {text.load('at + j')} * weight; }}")
    elif blend:
        for t in range(blend):
            source.add(f"i64 at{t} = from + {text.index('h', 'h', t)} * W; T weight{t} = {text.weight('h', 'h', t)};")
        terms = [f"{text.load(f'at{t} + j')} * weight{t}" for t in range(blend)]
        source.add(f"for (int j = 0; j < W; j++) line[j] = {_sum(terms)};")
    elif stage.h is not None:
        source.add(f"from += {text.index('h', 'h', 0)} * W;")

    def at(index: str) -> str:
        return f"line[{index}]" if blend != 0 else text.load(f"from + {index}")

    def tap(t: int | str) -> str:
        return f"{at(text.index('w', 'j', t))} * {text.weight('w', 'j', t)}"

    factor, first, last = _factor(stage.w)
    source.fixed(FACTOR=factor)
    ends = "for (int j = 0; j < OW; j++) {"
    if factor:
        source.dims(FIRST=first, LAST=last)
        ends = "for (int j = 0; j < OW; j++) {\nif (j == FIRST * FACTOR) j = LAST * FACTOR;\nif (j == OW) break;"
        values = []
        for p in range(factor):
            place = f"(FIRST * FACTOR + {p})"
            if not across:
                source.add(f"int s{p} = {text.index('w', place, 0)} - FIRST;")
                values.append(at(f"s{p} + i"))
                continue
            for t in range(across):
                source.add(f"int s{p}{t} = {text.index('w', place, t)} - FIRST;")
                source.add(f"T w{p}{t} = {text.weight('w', place, t)};")
            values.append(_sum([f"{at(f's{p}{t} + i')} * w{p}{t}" for t in range(across)]))
        source.add("for (int i = FIRST; i < LAST; i++) {")
        for p, value in enumerate(values):
            source.add(f"T v{p} = {value};")
        for p in range(factor):
            source.add(text.store(f"to + i * FACTOR + {p}", f"v{p}"))
        source.add("}")
    source.add(ends)
    if across is None:
        source.add(f"T v = {tap(0)};")
        source.add(f"for (int t = 1; t < WTAPS; t++) v += {tap('t')};")
    elif across:
        source.add(f"T v = {_sum([tap(t) for t in range(across)])};")
    else:
        source.add(f"T v = {at(text.index('w', 'j', 0))};")
    if stage.crop:
        source.add("v = wo[j] ? fill[0] : v;")
    source.add(text.store("to + j", "v") + "\n}\n}")
    return source.call(shares.grid[:1])


def _pixels(stage: ResizeStage, slice: int, target: Target, specialise: bool) -> EmittedLaunch:
    """The launch for elements behind w that stay together: each pixel of the result is a blend of whole pixels."""
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
            source.add(f"i64 row{a} = from + {text.index('h', 'h', a)} * W * INNER;")
            if blend:
                source.add(f"T a{a} = {text.weight('h', 'h', a)};")
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
    """Writes the statements of one pixel, with its taps written out."""
    source, terms = text.source, []
    for a in range(blend or 1):
        for b in range(across or 1):
            source.add(f"i64 at{a}{b} = row{a} + {text.index('w', 'w', b)} * INNER;")
            if across:
                source.add(f"T c{a}{b} = {f'a{a} * ' if blend else ''}{text.weight('w', 'w', b)};")
            value = text.load(f"at{a}{b} + l")
            terms.append(f"{value} * c{a}{b}" if across else value)
    source.add(f"for (int l = 0; l < count; l++) {{ T v = {_sum(terms)}; {text.store('to + l', 'v')} }}")


def _pixel_loop(text: _Text) -> None:
    """Writes the statements of one pixel, with its taps in a loop.

    The sum is kept in memory, so that the elements of the pixel are vectorised.
    """
    source, two = text.source, text.stage.h is not None
    source.add("for (int l = 0; l < count; l++) sum[l] = 0;")
    if two:
        source.add("for (int a = 0; a < HTAPS; a++)")
    source.add("for (int b = 0; b < WTAPS; b++) {")
    row, factor = (f"{text.index('h', 'h', 'a')} * W + ", f"{text.weight('h', 'h', 'a')} * ") if two else ("", "")
    source.add(f"i64 at = from + ({row}{text.index('w', 'w', 'b')}) * INNER;")
    source.add(f"T weight = {factor}{text.weight('w', 'w', 'b')};")
    source.add(f"for (int l = 0; l < count; l++) sum[l] += {text.load('at + l')} * weight;\n}}")
    source.add(f"for (int l = 0; l < count; l++) {text.store('to + l', 'sum[l]')}")


SOLVERS = both(Resize)
