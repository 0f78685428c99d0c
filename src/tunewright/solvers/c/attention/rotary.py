"""Rotary embeddings: rotates the halves of each head (or pairs of neighbours) by angles that depend on the position."""

from __future__ import annotations

from typing import ClassVar

from tunewright.devices.base import Target
from tunewright.ir.types import DType
from tunewright.solvers.base import Config, Problem, tensor

from ..source.base import CSolver, both
from ..source.emit import EmittedLaunch, In, Out, Source
from ..source.indices import ROW, Shares, no_indices, unfit

_FLOATS = frozenset({DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16})
_MICROSOFT = "com.microsoft::RotaryEmbedding"

_TEXT = """
int begin = GID(0) * SHARE, end = begin + SHARE < ROWS ? begin + SHARE : ROWS;
for (int r = begin; r < end; r++) {  /* a row is one head at one position */
  int b = r / (HEADS * LENGTH), n = r / LENGTH % HEADS, s = r % LENGTH;
  i64 at = b * HEADS * LENGTH * SIZE + n * HEAD_STRIDE + s * STRIDE, angles = ANGLES;
  for (int i = 0; i < HALF; i++) {
    i64 j = at + i * STEP, k = j + GAP;
    T re = FIRST, im = SECOND, c = COS, si = SIN;
    STORE_FIRST
    STORE_SECOND
  }
  for (int i = 2 * HALF; i < SIZE; i++) y[at + i] = x[at + i];
}
"""


class Rotary(CSolver):
    """Takes [batch, heads, length, size] or [batch, length, heads * size].

    A position outside of the caches is reported, and replaced by the nearest one inside.
    """

    family = "rotary"
    ops = frozenset({"RotaryEmbedding", _MICROSOFT})
    dtypes: ClassVar[frozenset[DType]] = _FLOATS | {DType.INT32, DType.INT64}
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = unfit(problem, 3 if problem.op != _MICROSOFT else 4)
        if reason is not None:
            return reason
        cos, _, positions, heads = _operands(problem)
        if tensor(problem.inputs[0]).dtype not in _FLOATS:
            return f"does not compute with {tensor(problem.inputs[0]).dtype}"
        reason = no_indices(problem.input(positions))
        if reason is not None or not problem.is_static:
            return reason
        shape, cache = tensor(problem.inputs[0]).dims, tensor(problem.inputs[cos]).dims
        if len(shape) == 3 and (not heads or shape[2] % heads):
            return f"{list(shape)} does not split into {heads} heads"
        size = shape[3] if len(shape) == 4 else shape[2] // heads
        wanted = 0 if problem.op == _MICROSOFT else int(problem.attrs.get("rotary_embedding_dim", 0)) or size
        if 2 * cache[-1] > size or (wanted and cache[-1] != wanted // 2):
            return f"caches of {cache[-1]} angles for heads of {size}, which the host reports"
        return None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        cos, sin, positions, heads = _operands(problem)
        x, cache = tensor(problem.inputs[0]), tensor(problem.inputs[cos])
        if not x.size:
            return []
        if len(x.dims) == 4:
            batch, heads, length, size = x.dims
            head_stride, stride = length * size, size
        else:
            batch, length, size = x.dims[0], x.dims[1], x.dims[2] // heads
            head_stride, stride = size, heads * size
        half = cache.dims[-1]
        shares = Shares.of(batch * heads * length, size, 2 * x.dtype.itemsize, target)
        source = Source("rotary", self.specialise)
        source.buffer("x", x.dtype, In(0))
        source.buffer("cosines", cache.dtype, In(cos))
        source.buffer("sines", tensor(problem.inputs[sin]).dtype, In(sin))
        given = problem.input(positions)
        if given is None:
            source.dims(BATCH_STEP=0 if cache.dims[0] == 1 else length)
            row = "b * BATCH_STEP + s"
        else:
            where = tensor(given)
            source.buffer("positions", where.dtype, In(positions))
            first = where.size == 1 and batch * length != 1  # the position of the first token; the others follow
            alike = where.size == length and batch > 1
            source.dims(BATCH_STEP=0 if first or alike else length, TOKEN_STEP=int(not first), FOLLOWS=int(first))
            source.dims(CACHE=cache.dims[0])
            source.function(ROW)
            row = "row_of(positions[b * BATCH_STEP + s * TOKEN_STEP], s * FOLLOWS, CACHE, report)"
        source.buffer("y", x.dtype, Out())
        interleaved = bool(problem.attrs.get("interleaved", 0))
        source.fixed(T=source.compute("x"), STEP=2 if interleaved else 1, GAP="1" if interleaved else "HALF")
        source.dims(ROWS=batch * heads * length, HEADS=heads, LENGTH=length, SIZE=size, HALF=half)
        source.dims(HEAD_STRIDE=head_stride, STRIDE=stride, SHARE=shares.rows)
        text = _TEXT.replace("ANGLES", f"(i64)({row}) * HALF")
        for name, found in (
            ("STORE_FIRST", source.store("y", "j", "re * c - im * si")),
            ("STORE_SECOND", source.store("y", "k", "re * si + im * c")),
            ("FIRST", source.load("x", "j")), ("SECOND", source.load("x", "k")),
            ("COS", source.load("cosines", "angles + i")), ("SIN", source.load("sines", "angles + i")),
        ):  # fmt: skip
            text = text.replace(name, found)
        source.add(text)
        return [source.call(shares.grid[:1])]


def _operands(problem: Problem) -> tuple[int, int, int, int]:
    """The inputs of cosines, sines and positions, and the number of heads where the shape does not show it."""
    heads = int(problem.attrs.get("num_heads", 0))
    if problem.op != _MICROSOFT:
        return 1, 2, 3, heads
    x, cache = tensor(problem.inputs[0]), tensor(problem.inputs[2])
    if not heads and x.is_static and cache.is_static and len(x.dims) == 3 and cache.dims[-1]:
        heads = x.dims[2] // (2 * cache.dims[-1])
    return 2, 3, 1, heads


SOLVERS = both(Rotary)
