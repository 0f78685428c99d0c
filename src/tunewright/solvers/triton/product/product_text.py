"""The kernel text of products and convolutions. One text serves both, as a convolution is an implicit product."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tunewright.ir.symbolic import always_divides
from tunewright.ir.types import TensorType
from tunewright.solvers.base import Problem

from ..source.text import HEAD, NAMES, chain
from . import precision
from .product_shape import FoldedWindow, ProductShape, fold, steps, steps_each

#: Elements per thread of each operand that may be loaded before the sum.
EARLY = 64


@dataclass(frozen=True)
class Addend:
    """How input 2 is added: the elements between neighbours along rows and along columns. 0 means the same for all."""

    rows: int = 0
    columns: int = 1
    #: factors of the product and of input 2
    alpha: float = 1.0
    beta: float = 1.0
    #: whether there is an input 2
    given: bool = True


class _Lines:
    """Collects the lines of a kernel and indents them by the blocks around them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.indent = "    "

    def __call__(self, *lines: str) -> None:
        self.lines += [self.indent + line for line in lines]

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self(head)
        self.indent += "    "
        yield
        self.indent = self.indent[4:]


def text(problem: Problem, shape: ProductShape, config: Mapping[str, Any], addend: Addend, programs: int) -> str:
    """The text of the kernel for a shape. ``form`` of the config is one of three.

    "tiles": one program per tile, whose threads load their own operands. "descriptors": ``programs`` programs, which
    compute one tile after the other, with loads by the memory engine. "specialised": the same, but some warps only
    issue loads and the others multiply.
    """
    bm, bn, split = (int(config[k]) for k in ("bm", "bn", "split"))
    form = str(config.get("form", "tiles"))
    operands = [f"p{i}" for i in range(len(problem.main_inputs), len(problem.inputs))]
    more = ["parts", "counters"] if split > 1 else []
    pointers = ["x", "w", *(["bias"] if addend.given else []), *operands, "out", *more]
    emit = _Lines()
    if form == "tiles":
        emit("tile = tl.program_id(0)")
        _tile(emit, problem, shape, config, addend)
    else:
        _descriptors(emit, shape, config)
        # Flattened with the loop over steps, so that the loads of the next tile start while this one is written.
        joined = ", flatten=True" if form == "descriptors" else ""
        with emit.block(f"for tile in tl.range(tl.program_id(0), {shape.tiles(bm, bn)}, {programs}{joined}):"):
            _tile(emit, problem, shape, config, addend)
    return HEAD + "\n".join(["@triton.jit", f"def kernel({', '.join(pointers)}):", *emit.lines]) + "\n"


def _descriptors(emit: _Lines, shape: ProductShape, config: Mapping[str, Any]) -> None:
    """Emit the descriptors of the matrices whose tiles the memory engine copies. Elements outside are zero."""
    bm, bn, bk = (int(config[k]) for k in ("bm", "bn", "bk"))
    if shape.dense:
        emit(f"left = tl.make_tensor_descriptor(x, shape=[{shape.rows}, {shape.depth}], "
             f"strides=[{shape.depth}, 1], block_shape=[{bm}, {bk}])")  # fmt: skip
    deep = shape.kernel[0] * shape.kernel[1] * shape.depth
    emit(f"right = tl.make_tensor_descriptor(w, shape=[{deep}, {shape.columns}], "
         f"strides=[{shape.columns}, 1], block_shape=[{bk}, {bn}])")  # fmt: skip


def _tile(emit: _Lines, problem: Problem, shape: ProductShape, config: Mapping[str, Any], addend: Addend) -> None:
    """Emit one tile, from its number to the result."""
    bm, bn, split, group = (int(config[k]) for k in ("bm", "bn", "split", "group"))
    rows, columns, blocks = shape.rows, shape.columns, _blocks(bn)
    down, across = -(-rows // bm), -(-columns // bn)
    inner = "tile"
    if shape.products > 1:
        emit(f"part_of = tile // {down * across}", f"inner = tile % {down * across}")
        inner = "inner"
    if group > 1 and down > 1 and across > 1:  # tiles that share inputs run at the same time
        emit(
            f"first = {inner} // {group * across} * {group}", f"high = min({down} - first, {group})",
            f"within = {inner} % {group * across}", "row = first + within % high", "column = within // high",
        )  # fmt: skip
    else:
        emit(f"row = {inner} % {down}", f"column = {inner} // {down}")
    emit(f"m = row * {bm} + tl.arange(0, {bm})")
    emit(*(f"n{b.name} = column * {bn} + {b.start}tl.arange(0, {b.width})" for b in blocks))
    finish = _Finish(problem, shape, addend)
    if len(blocks) > 1:
        _sum(emit, problem, shape, config)
        for b in blocks:
            emit(f"n = n{b.name}", f"acc = acc{b.name}", *finish.addend, *finish.loads, *finish.statements)
        return
    emit(*finish.addend)
    # Load input 2 and the operands during the sum, as long as enough registers are left.
    early = split == 1 and bm * bn <= EARLY * 32 * int(config["warps"]) and config.get("form", "tiles") == "tiles"
    if early:
        emit(*finish.loads)
    _sum(emit, problem, shape, config)
    if split == 1:
        emit(*([] if early else finish.loads), *finish.statements)
        return
    emit(
        f"inside_tile = tl.arange(0, {bm})[:, None] * {bn} + tl.arange(0, {bn})[None, :]",
        f"at_part = parts + tile * {split * bm * bn} + inside_tile",
        f"tl.store(at_part + part * {bm * bn}, acc)", "tl.debug_barrier()",
        "arrived = tl.atomic_add(counters + tile, 1, sem=\"acq_rel\")",
    )  # fmt: skip
    with emit.block(f"if arrived == {split - 1}:"):
        emit("tl.store(counters + tile, 0)", *finish.loads, 'acc = tl.load(at_part, cache_modifier=".cg")')
        # unrolled: all loads are in flight together, and are added in order
        with emit.block(f"for other in tl.static_range(1, {split}):"):
            emit(f'acc += tl.load(at_part + other * {bm * bn}, cache_modifier=".cg")')
        emit(*finish.statements)


def _sum(emit: _Lines, problem: Problem, shape: ProductShape, config: Mapping[str, Any]) -> None:
    """Emit ``acc``, this program's part of the sum."""
    bm, bn, bk, split = (int(config[k]) for k in ("bm", "bn", "bk", "split"))
    form = config.get("form", "tiles")
    folded, engine = fold(shape, config), form != "tiles"
    depth, number, each = shape.depth, steps(shape, config), steps_each(shape, config)
    beyond = each * split > number  # the last parts may have fewer steps, or none, so a mask guards the end
    first = x = "x"
    weights, column = "w", "{n}[None, :]"
    if shape.groups > 1:
        x, column = f"x + part_of * {depth}", f"(part_of * {shape.columns} + {{n}})[None, :]"
    elif shape.batch:
        x, weights = (f"{at} + {_place(shape, i)}" for i, at in ((1, "x"), (2, "w")))
    whole = [] if always_divides(bm, shape.rows) else [f"(m < {shape.rows})"]
    if not engine or not shape.dense:
        emit(f"k = tl.arange(0, {bk})")
        if shape.dense:
            emit(f"rows = {x} + m[:, None] * {shape.channels}")
        else:
            _windows(emit, shape, x, folded)
    emit(*(f"acc{b.name} = tl.zeros(({bm}, {b.width}), tl.float32)" for b in _blocks(bn)))
    if split > 1:
        emit("part = tl.program_id(1)")
    apart = ", warp_specialize=True" if form == "specialised" else ""
    head = f"for number in range(0, {each}):" if split > 1 else f"for step in tl.range(0, {number}{apart}):"
    with emit.block(head):
        if split > 1:
            emit(f"step = part * {each} + number")
        mask_b: list[str] = []
        if folded is not None:
            first = _folded(emit, shape, config, whole)
            at_b = f"step * {bk} + k"
        elif shape.dense:
            emit(f"at = step * {bk}")
            inside = [f"((at + k) < {depth})[None, :]"] if beyond or not always_divides(bk, depth) else []
            terms = [f"({' & '.join(whole)})[:, None]"] * bool(whole) + inside
            first = f"tl.load(rows + (at + k[None, :]){_mask(terms)})"
            at_b = "at + k"
            mask_b = [term.replace("[None, :]", "[:, None]") for term in inside]
        else:
            chunks = -(-depth // bk)
            emit(
                f"tap = step // {chunks}", f"at = step % {chunks} * {bk}",
                f"dy = tap // {shape.kernel[1]} * {shape.dilation[0]}",
                f"dx = tap % {shape.kernel[1]} * {shape.dilation[1]}",
            )  # fmt: skip
            tests = list(whole)
            if shape.padded:
                tests += [f"(top + dy >= 0) & (top + dy < {shape.height})",
                          f"(left + dx >= 0) & (left + dx < {shape.width})"]  # fmt: skip
            inside = []
            if beyond or not always_divides(bk, depth):
                last = f" & (step < {number})" if beyond else ""
                inside = [f"(((at + k) < {depth}){last})[None, :]"]
            terms = [f"({' & '.join(tests)})[:, None]"] * bool(tests) + inside
            place = f"(dy * {shape.width} + dx) * {shape.channels} + at + k[None, :]"
            first = f"tl.load(rows + ({place}){_mask(terms)})"
            at_b = f"tap * {depth} + at + k"
            mask_b = [term.replace("[None, :]", "[:, None]") for term in inside]
        if not always_divides(bn, shape.columns):
            mask_b.append(f"({{n}} < {shape.columns})[None, :]")
        second = f"tl.load({weights} + ({at_b})[:, None] * {shape.filters} + {column}{_mask(mask_b)})"
        if engine:
            second = f"right.load([{at_b.removesuffix(' + k')}, column * {bn}])"
            first = f"left.load([row * {bm}, at])" if shape.dense else first
        emit(f"a = {first}")
        if folded is not None and not folded.exact:
            # Elements beside the window have zero weights, but may be infinite.
            emit(f"a = tl.where(((r >= {folded.shift}) & (r < {folded.shift + folded.width}))[None, :], a, 0.0)")
        how = precision.option(precision.dtype(problem), config)
        for b in _blocks(bn):
            emit(f"b = {second.replace('{n}', f'n{b.name}')}", f"acc{b.name} = tl.dot(a, b, acc{b.name}{how})")


@dataclass(frozen=True)
class _Block:
    """Columns of a tile that are multiplied together. ``name`` is the suffix of their variables."""

    name: str
    start: str
    width: int


def _blocks(bn: int) -> list[_Block]:
    """The blocks of a tile. Triton needs powers of two, so any other number of columns makes two blocks."""
    if bn & (bn - 1) == 0:
        return [_Block("", "", bn)]
    first = 1 << bn.bit_length() - 1
    return [_Block("0", "", first), _Block("1", f"{first} + ", bn - first)]


def _place(shape: ProductShape, which: int) -> str:
    """The offset of the left (1) or right (2) matrix of product ``part_of``, as an expression."""
    terms, inner = [], 1
    for axis, entry in reversed(list(enumerate(shape.batch))):
        number, between = entry[0], entry[which]
        if between:
            term = "part_of" if inner == 1 else f"(part_of // {inner})"
            terms.append(f"{term if axis == 0 else f'({term} % {number})'} * {between}")
        inner *= number
    return " + ".join(terms) or "0"


def _windows(emit: _Lines, shape: ProductShape, x: str, folded: FoldedWindow | None) -> None:
    """Emit ``rows``, where each pixel's window starts, and ``top`` and ``left``. In folded rows ``left`` counts
    elements."""
    area, between = shape.out_height * shape.out_width, shape.channels
    emit(f"image = m // {area}", f"top = m % {area} // {shape.out_width} * {shape.stride[0]} - {shape.head[0]}")
    if folded is not None:
        # Divisors of `left` tell the compiler how much a thread may load at once. So `wide` is applied before the
        # product.
        emit(
            f"left = wide(m % {shape.out_width})", "top = wide(top)",
            f"left = left * {shape.stride[1] * between} - {shape.head[1] * between + folded.shift}",
            f"rows = {x} + ((image * {shape.height} + top) * {shape.width * between} + left)[:, None]",
        )  # fmt: skip
        return
    emit(
        f"left = m % {shape.out_width} * {shape.stride[1]} - {shape.head[1]}",
        f"rows = {x} + (((image * {shape.height} + top) * {shape.width} + left) * {between})[:, None]",
    )  # fmt: skip
    if shape.padded:
        emit("top = wide(top)", "left = wide(left)")


def _folded(emit: _Lines, shape: ProductShape, config: Mapping[str, Any], whole: Sequence[str]) -> str:
    """Emit and return the load of one step of folded rows. ``r`` are the positions along a row of the window."""
    folded, bk = fold(shape, config), int(config["bk"])
    assert folded is not None
    line = shape.width * shape.channels
    beside = shape.padded or not folded.exact
    column = [f"(left[:, None] + r[None, :] >= 0) & (left[:, None] + r[None, :] < {line})"] * beside
    if folded.flat:
        emit(f"j = step * {bk} + k", f"dy = j // {folded.pitch} * {shape.dilation[0]}", f"r = j % {folded.pitch}")
        terms = [f"(j < {shape.kernel[0] * folded.pitch})[None, :]"]
        if shape.padded:
            moved = "top[:, None] + dy[None, :]"
            terms.append(f"({moved} >= 0) & ({moved} < {shape.height})")
        place = f"(dy * {line} + r)[None, :]"
    else:
        chunks = folded.pitch // bk
        emit(f"dy = step // {chunks} * {shape.dilation[0]}", f"r = step % {chunks} * {bk} + k")
        terms = [f"(r < {folded.end})[None, :]"]
        if steps_each(shape, config) * int(config["split"]) > shape.kernel[0] * chunks:
            terms.append(f"(step < {shape.kernel[0] * chunks})")
        if shape.padded:
            terms.append(f"((top + dy >= 0) & (top + dy < {shape.height}))[:, None]")
        place = f"(dy * {line} + r[None, :])"
    terms += [f"{test}[:, None]" for test in whole] + column
    return f"tl.load(rows + {place}{_mask(terms)})"


def _mask(terms: Sequence[str]) -> str:
    return f", mask={' & '.join(terms)}, other=0.0" if terms else ""


class _Finish:
    """The end of a tile: loads that do not need the sum, and the statements from the sum to the result."""

    def __init__(self, problem: Problem, shape: ProductShape, addend: Addend) -> None:
        out = problem.outputs[0]
        assert isinstance(out, TensorType)
        rows, columns = shape.rows, shape.columns
        column, line = "n", "m"
        if shape.groups > 1:
            column = f"(part_of * {columns} + n)"
        elif shape.batch:
            line = f"(part_of * {rows} + m)"
        self.loads = [f"valid = (m < {rows})[:, None] & (n < {columns})[None, :]",
                      f"spot = {line}[:, None] * {shape.filters} + {column}[None, :]"]  # fmt: skip
        #: the load of a small input 2
        self.addend: list[str] = []
        self.statements = [f"acc = acc * {addend.alpha!r}"] if addend.alpha != 1.0 else []
        if addend.given:
            times = "" if addend.beta == 1.0 else f" * {addend.beta!r}"
            spread = ""
            if addend.rows:
                place = f"m[:, None] * {addend.rows} + {column}[None, :] * {addend.columns}"
                self.loads.append(f"added = tl.load(bias + {place}, mask=valid, other=0.0)")
            elif addend.columns:
                spread = "[None, :]"
                self.addend = [f"added = tl.load(bias + {column}, mask=n < {columns}, other=0.0)"]
            else:
                self.addend = ["added = tl.load(bias)"]
            self.statements.append(f"acc += added.to(tl.float32){spread}{times}")
        along = {"last": f"{column}[None, :]", "last_mask": f"(n < {columns})[None, :]"}
        body, last = chain(problem, "acc", "spot", "valid", indent="", early=self.loads, **along)
        self.statements += [*body, f"tl.store(out + spot, {last}.to({NAMES[out.dtype]}), mask=valid)"]
