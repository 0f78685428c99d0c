"""Attention in one kernel: a program takes a block of queries through all keys, with a running softmax.

Rows are queries of one head of keys and values. Heads that share one lie behind each other, so that a single query
fills a tile too. With ``split`` above one, several programs share the keys of a block. Each leaves its highest score,
the sum of its weights and its part of the result in scratch memory. The last program to finish combines them in order,
so each run has the same result. A key that a mask or a window forbids counts as minus infinity, whatever its score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tunewright.devices.base import Device, Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.symbolic import SymInt, always_divides, greater
from tunewright.ir.types import DType, TensorType
from tunewright.search.space import Scalar, Space
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from .. import attention_form
from ..attention_form import UNBOUNDED, AttentionForm, Heads, form
from ..base import Config, Kernel, Problem
from .elementwise.elementwise import why_not_layouts
from .product import precision
from .source.expr import number
from .source.text import HEAD, NAMES, chain, load, why_not_chain

_FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32})
#: largest size of a query or value that still leaves room for its tile
WIDEST = 256
#: positions are counted in 32 bits
MOST_ELEMENTS = 1 << 31
LOG2E = math.log2(math.e)
#: the part of a multiprocessor's shared memory that a tile's operands may take
SHARED_BYTES = 200 << 10
#: registers that a thread may use for sums and scores, of 255 for everything
MOST_REGISTERS = 128


class TritonAttention(CudaSolver):
    """Softmax(q k' * scale + mask) v: heads side by side or apart, shared ones, windows, caps, lengths; no past."""

    id = "triton.attention"
    version = "1.1"
    ops = attention_form.ANYWHERE
    dtypes = _FLOATS | {DType.BOOL, DType.INT64, DType.INT32}
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = attention_form.why_not(problem)
        if reason is not None:
            return reason
        f = form(problem)
        q, k, v = (problem.input(i) for i in f.sources)
        assert isinstance(q, TensorType) and isinstance(k, TensorType) and isinstance(v, TensorType)
        if q.dtype not in _FLOATS or v.dtype is not q.dtype:
            return f"does not multiply {q.dtype} and {v.dtype}"
        if len(problem.outputs) > 1:
            return "makes one output"
        if f.past:
            return "takes no past"
        if f.rounding:
            return f"does not round to {f.rounding} in between"
        if not 1 <= min(f.size, f.width) <= max(f.size, f.width) <= WIDEST:
            return f"takes heads of 1 to {WIDEST} elements, not {f.size} and {f.width}"
        if any(isinstance(t, TensorType) and t.size >= MOST_ELEMENTS for t in (*problem.inputs, *problem.outputs)):
            return "is too large"
        if problem.epilogue:
            return why_not_chain(problem, main=False) or why_not_layouts(problem, len(problem.main_inputs))
        return None

    def inexact(self, problem: Problem, config: Config) -> str | None:
        return precision.inexact(config)

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        return precision.marked(super().compile(problem, config, device), config)

    def space(self, problem: Problem, target: Target) -> Space:
        f, units, item = form(problem), max(target.units, 1), _item(problem)

        def useful(config: Mapping[str, Any]) -> bool:
            bm, bn, split = (int(config[k]) for k in ("bm", "bn", "split"))
            if bm >= 2 * max(_rows(f), 16) or bn >= 2 * max(f.total, 16) or bm * bn > 128 * 128:
                return False
            if _registers(f, bm, bn, int(config["warps"])) > MOST_REGISTERS:
                return False
            if not precision.is_safe(config, bm, int(config["warps"])):
                return False
            loaded = int(config["stages"]) * bn * (_span(f.size) + _span(f.width))
            if (bm * _span(f.size) + loaded) * item > SHARED_BYTES:
                return False
            return split == 1 or (split <= -(-f.total // bn) and _tiles(f, bm) * split <= 6 * units)

        params: dict[str, Sequence[Scalar]] = {
            "bm": (16, 32, 64, 128), "bn": (16, 32, 64, 128), "split": (1, 2, 3, 4, 6, 8, 12, 16),
            "warps": (1, 2, 4, 8), "stages": (1, 2, 3, 4),
        }  # fmt: skip
        return Space(params | precision.params(_dtype(problem)), useful, version="2")

    def default(self, problem: Problem, target: Target) -> Config:
        """Choose blocks of as many queries as leave work for every multiprocessor; else split long keys."""
        f, units, wide = form(problem), max(target.units, 1), _item(problem) > 2
        most = 32 if wide else 64 if _span(f.width) > 128 else 128
        fits = [bm for bm in (16, 32, 64, 128) if bm <= most and (bm == 16 or bm < 2 * _rows(f))]
        bm = max((bm for bm in fits if _tiles(f, bm) >= units), default=16)
        most = 32 if wide or _span(f.size) > 128 else 128 if bm <= 32 and f.size <= 64 else 64
        bn = max(bn for bn in (16, 32, 64, 128) if bn <= most and (bn == 16 or bn < 2 * f.total))
        steps, tiles = -(-f.total // bn), _tiles(f, bm)
        split = max(s for s in (1, 2, 3, 4, 6, 8, 12, 16) if s == 1 or (2 * s <= steps and tiles * s <= 2 * units))
        many = wide or bm == 128 or _registers(f, bm, bn, 4) > MOST_REGISTERS
        config = {"bm": bm, "bn": bn, "split": split, "warps": 8 if many else 4, "stages": 2}
        return config | precision.default(_dtype(problem))

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return text(problem, form(problem), config)

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        f, split, bm = form(problem), int(config["split"]), int(config["bm"])
        kernel, tiles = load(text(problem, f, config)), _tiles(f, bm)
        options = {"num_warps": int(config["warps"]), "num_stages": int(config["stages"])}
        scratch = tiles * split * bm * (_span(f.width) + 2) * 4 if split > 1 else 0
        used, grid = _used(problem, f), (tiles, split)

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            if not tiles:
                return
            given = [*(inputs[i] for i in used), outputs[0]]
            if split > 1:
                given += [queue.scratch(scratch).view(precision.float32()), queue.zeros(tiles)]
            kernel[grid](*given, **options)

        return call


def _dtype(problem: Problem) -> DType:
    q = problem.inputs[0]
    assert isinstance(q, TensorType)
    return q.dtype


def _item(problem: Problem) -> int:
    return _dtype(problem).itemsize


def _rows(f: AttentionForm) -> int:
    """Return the number of queries that meet the same keys: those of every head that shares them."""
    return f.heads // max(f.groups, 1) * f.queries


def _tiles(f: AttentionForm, bm: int) -> int:
    return f.batch * f.groups * -(-_rows(f) // bm)


def _span(size: int) -> int:
    """Return the elements of a head as a tile holds them: a power of two, at least the minimum of tensor cores."""
    return max(16, 1 << (size - 1).bit_length())


def _registers(f: AttentionForm, bm: int, bn: int, warps: int) -> float:
    """Return the sums and scores that a thread holds."""
    return bm * (_span(f.width) + bn) / (32 * warps)


def _start(heads: Heads) -> str:
    return f"{heads.start} + " if heads.start else ""


def _used(problem: Problem, f: AttentionForm) -> list[int]:
    """Return the inputs that the kernel reads, in the order of its arguments."""
    more = [f.mask.index] if f.mask is not None else []
    more += [f.valid] if f.valid is not None else []
    return [*f.sources, *more, *range(len(problem.main_inputs), len(problem.inputs))]


def text(problem: Problem, f: AttentionForm, config: Mapping[str, Any]) -> str:
    """Return the kernel for a form."""
    bm, bn, split = (int(config[k]) for k in ("bm", "bn", "split"))
    out = problem.outputs[0]
    assert isinstance(out, TensorType)
    rows, sharing = _rows(f), f.heads // max(f.groups, 1)
    deep, wide, down = _span(f.size), _span(f.width), greater(1, -(-rows // bm))
    pointers = ["q", "k", "v", *(["mask"] if f.mask is not None else []), *(["valid"] if f.valid is not None else []),
                *(f"p{i}" for i in range(len(problem.main_inputs), len(problem.inputs))), "out",
                *(["parts", "counters"] if split > 1 else [])]  # fmt: skip
    lines = ["@triton.jit", f"def kernel({', '.join(pointers)}):"]

    def emit(*more: str) -> None:
        lines.extend("    " + line for line in more)

    emit(
        "tile = tl.program_id(0)", f"batch = tile // {down * f.groups}", f"group = tile // {down} % {f.groups}",
        f"r = tile % {down} * {bm} + tl.arange(0, {bm})",
        f"m = r % {f.queries}" if sharing > 1 else "m = r",
        f"head = group * {sharing} + r // {f.queries}" if sharing > 1 else "head = group",
        f"d = tl.arange(0, {deep})", f"e = tl.arange(0, {wide})",
        f"q_at = {_start(f.q)}batch * {f.q.batch} + head * {f.q.head} + m * {f.q.row}",
        f"k_at = {_start(f.k)}batch * {f.k.batch} + group * {f.k.head}",
        f"v_at = {_start(f.v)}batch * {f.v.batch} + group * {f.v.head}",
        f"a = tl.load(q + q_at[:, None] + d[None, :], mask=(r < {rows})[:, None] & (d < {f.size})[None, :], other=0.0)",
        f"top = tl.full(({bm},), -float(\"inf\"), tl.float32)", f"total = tl.zeros(({bm},), tl.float32)",
        f"acc = tl.zeros(({bm}, {wide}), tl.float32)", *_bounds(f, bm, bn, split),
    )  # fmt: skip
    emit(*("    " + line for line in _step(problem, f, config)))
    indent = "    "
    if split > 1:
        emit(*_gather(bm, wide, split, _exp(problem, f)))
        indent = "        "
    # where everything is masked the sum is zero, and so is the result; MultiHeadAttention's result is NaN there
    whole = "tl.where(total == 0.0, 1.0, total)" if f.forgiving else "total"
    lines += [
        indent + line
        for line in (
            f"inside = (r < {rows})[:, None] & (e < {f.width})[None, :]",
            f"spot = (batch * {f.y.batch} + head * {f.y.head} + m * {f.y.row})[:, None] + e[None, :]",
            f"acc = acc / ({whole})[:, None]",
        )
    ]
    body, last = chain(problem, "acc", "spot", "inside", indent=indent)
    lines += [*body, indent + f"tl.store(out + spot, {last}.to({NAMES[out.dtype]}), mask=inside)"]
    return HEAD + "\n".join(lines) + "\n"


def _bounds(f: AttentionForm, bm: int, bn: int, split: int) -> list[str]:
    """Return the loop over this program's blocks of keys: those that its queries may see at all."""
    lines, limit, offset = [], str(_columns(f)), "0"
    if split > 1:
        lines.append("part = tl.program_id(1)")
    if not _moving(f):
        steps = -(-_columns(f) // bn)
        if split == 1:
            return [f"for step in range(0, {steps}):"]
        each = -(-steps // split)  # the last parts may have fewer, or none: keys beyond the end are masked
        return [*lines, f"for number in range(0, {each}):", f"    step = part * {each} + number"]
    if f.valid is not None:
        lines.append("there = tl.load(valid + batch).to(tl.int32)")
        limit, offset = f"tl.minimum(there, {limit})", f"there - {f.queries}"
    lines.append(f"place = m + ({offset})")
    # Blocks of heads that share keys may begin at any query.
    lowest = f"tile % {greater(1, -(-_rows(f) // bm))} * {bm}" if f.heads == f.groups else "0"
    first = "0"
    if f.right < UNBOUNDED:
        furthest = f"tl.minimum({lowest} + {bm - 1}, {f.queries - 1})" if lowest != "0" else str(f.queries - 1)
        limit = f"tl.minimum({limit}, {furthest} + ({offset}) + {f.right + 1})"
    if f.left < UNBOUNDED:
        first = f"tl.maximum({lowest} + ({offset}) - {f.left}, 0) // {bn}"
    lines += [f"begin = {first}", f"end = (tl.maximum({limit}, 0) + {bn - 1}) // {bn}"]
    if split > 1:
        lines += [f"each = (end - begin + {split - 1}) // {split}", "begin = begin + part * each",
                  "end = tl.minimum(begin + each, end)"]  # fmt: skip
    return [*lines, "for step in range(begin, end):"]


def _moving(f: AttentionForm) -> bool:
    """Whether the visible keys depend on the query, or on values in memory."""
    return f.valid is not None or min(f.left, f.right) < UNBOUNDED


def _columns(f: AttentionForm) -> int:
    """Return the first key that nobody sees."""
    return f.total if f.mask is None else f.mask.columns


def _step(problem: Problem, f: AttentionForm, config: Mapping[str, Any]) -> list[str]:
    """Return the code for one block of keys and values."""
    bn, split, dtype = int(config["bn"]), int(config["split"]), _dtype(problem)
    deep, wide = _span(f.size), _span(f.width)
    how, exp = precision.option(dtype, config), _exp(problem, f)
    steps = -(-_columns(f) // bn)
    # no step goes beyond the end
    whole = always_divides(bn, f.total) and (_moving(f) or split == 1 or -(-steps // split) * split * bn <= f.total)
    near = [] if whole else [f"(t < {f.total})[:, None]"]
    loads = {}
    for name, count, span, axis in (("k", f.size, deep, "d"), ("v", f.width, wide, "e")):
        tests = [*near, *([f"({axis} < {count})[None, :]"] if count < span else [])]
        other = f", mask={' & '.join(tests)}, other=0.0" if tests else ""
        row = (f.k if name == "k" else f.v).row
        loads[name] = f"tl.load({name} + {name}_at + t[:, None] * {row} + {axis}[None, :]{other})"
    # Loads in a loop run one turn ahead. With a single turn, the load of the values must not wait for weights.
    early = not isinstance(steps, SymInt) and steps <= split and not _moving(f)
    values = [f"c = {loads['v']}"]
    lines = [
        f"t = step * {bn} + tl.arange(0, {bn})", f"b = {loads['k']}", *(values if early else []),
        f"s = tl.dot(a, tl.trans(b){how})",
    ]  # fmt: skip
    unit = _unit(problem, f)
    if f.softcap > 0:  # cap * tanh(s * scale / cap), tanh by a sigmoid
        cap = f.softcap * unit
        lines.append(f"s = tl.sigmoid(s * {number(2 * f.scale / f.softcap)}) * {number(2 * cap)} - {number(cap)}")
    else:
        lines.append(f"s = s * {number(f.scale * unit)}")
    seen = [] if whole and _columns(f) == f.total else [f"(t < {_columns(f)})[None, :]"]
    if f.valid is not None:
        seen.append("(t < there)[None, :]")
    if f.left < UNBOUNDED:
        seen.append(f"(t[None, :] >= place[:, None] - {f.left})")
    if f.right < UNBOUNDED:
        seen.append(f"(t[None, :] <= place[:, None] + {f.right})")
    if f.mask is not None:
        type = problem.inputs[f.mask.index]
        assert isinstance(type, TensorType)
        parts = (("batch", f.mask.batch), ("head", f.mask.head), ("m", f.mask.row))
        at = " + ".join(f"{name} * {stride}" for name, stride in parts if stride) or "0"
        at = f"mask + ({at})[:, None] + t[None, :]" if _by_row(f) else f"mask + {at} + t"
        tests = [f"(t < {f.mask.columns})" + ("[None, :]" if _by_row(f) else "")]
        tests += [f"(r < {_rows(f)})[:, None]"] if _by_row(f) else []
        boolean = type.dtype is DType.BOOL
        lines.append(f"bias = tl.load({at}, mask={' & '.join(tests)}, other={'False' if boolean else '0.0'})")
        lines += [] if _by_row(f) else ["bias = bias[None, :]"]
        if boolean:
            seen.append("(bias != 0)")
        else:
            lines += ["bias = bias.to(tl.float32)", "s = s + bias"]
            seen.append('(bias != -float("inf"))')
    if seen:
        lines.append(f's = tl.where({" & ".join(seen)}, s, -float("inf"))')
    return [
        *lines, "high = tl.maximum(top, tl.max(s, 1))", 'base = tl.where(high == -float("inf"), 0.0, high)',
        f"weights = {exp}(s - base[:, None])", f"shrunk = {exp}(top - base)",
        "total = total * shrunk + tl.sum(weights, 1)", *([] if early else values),
        f"acc = tl.dot(weights.to({NAMES[dtype]}), c, acc * shrunk[:, None]{how})", "top = high",
    ]  # fmt: skip


def _unit(problem: Problem, f: AttentionForm) -> float:
    """Return the factor of the scores: powers of two are quicker than exponentials.

    Not where something is added: that would round -65504 in a mask once more, and scores that it is added to.
    """
    type = None if f.mask is None else problem.inputs[f.mask.index]
    return LOG2E if type is None or (isinstance(type, TensorType) and type.dtype is DType.BOOL) else 1.0


def _exp(problem: Problem, f: AttentionForm) -> str:
    return "tl.exp" if _unit(problem, f) == 1.0 else "tl.exp2"


def _by_row(f: AttentionForm) -> bool:
    """Whether the mask differs between queries or between heads that share keys."""
    assert f.mask is not None
    return bool(f.mask.row) or (f.heads > f.groups and bool(f.mask.head))


def _gather(bm: int, wide: int, split: int, exp: str) -> list[str]:
    """Return code with which the last program combines the parts of a block."""
    slot = bm * (wide + 2)
    return [
        f"here = parts + tile * {split * slot}", f"row = tl.arange(0, {bm})",
        f"inner = row[:, None] * {wide} + e[None, :]",
        f"tl.store(here + part * {slot} + inner, acc)", f"tl.store(here + part * {slot} + {bm * wide} + row, top)",
        f"tl.store(here + part * {slot} + {bm * wide + bm} + row, total)", "tl.debug_barrier()",
        'arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")', f"if arrived == {split - 1}:",
        "    tl.store(counters + tile, 0)", f'    top = tl.full(({bm},), -float("inf"), tl.float32)',
        f"    for n in range(0, {split}):",
        f'        top = tl.maximum(top, tl.load(here + n * {slot} + {bm * wide} + row, cache_modifier=".cg"))',
        '    base = tl.where(top == -float("inf"), 0.0, top)', f"    total = tl.zeros(({bm},), tl.float32)",
        f"    acc = tl.zeros(({bm}, {wide}), tl.float32)", f"    for n in range(0, {split}):",
        f'        shrunk = {exp}(tl.load(here + n * {slot} + {bm * wide} + row, cache_modifier=".cg") - base)',
        f'        more = tl.load(here + n * {slot} + {bm * wide + bm} + row, cache_modifier=".cg")',
        f'        acc += tl.load(here + n * {slot} + inner, cache_modifier=".cg") * shrunk[:, None]',
        "        total += more * shrunk",
    ]  # fmt: skip


SOLVERS = (TritonAttention(),)
