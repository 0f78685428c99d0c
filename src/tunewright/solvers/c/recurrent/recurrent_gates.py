"""The usual LSTM (constant weights, Sigmoid and Tanh): all gates of a few hidden units, and their cell, in registers.

A step of one sequence takes as long as reading the weights of the hidden state, which lie in the second-level cache. In
`recurrent` that reading stops at the end of each block of each gate, and for the element-wise part of the step. Here
weights lie in panels [direction][block of units][depth][gate][units of the block], which a step reads from end to end.
The cell of a block is computed while the next panel is loaded. Steps read the panels alternately forwards and
backwards: the panels that were read last are still in the first-level cache. With a single step the input's product is
added to the same sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from tunewright.devices.base import Target, empty_on_lines
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..source.base import both
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Source
from . import recurrent_cell as cells
from .recurrent import BEGIN, Recurrent, RecurrentSizes, RecurrentWriter, fill_panels

GATES = 4
#: the most sequences in a tile
MOST_ROWS = 6
#: The bytes of a panel for which alternating steps find the most in the first-level cache; and the most sequences of a
#: single step, because `recurrent` multiplies more of them faster, as a matrix.
NEAR, FEW = 24 << 10, 3
#: the number of sums that keep the processor busy
BUSY = 8


def pack(weights: Array, block: int) -> Array:
    """Packs [directions, GATES * hidden, depth] as panels; zeros fill up a last block."""
    count, rows, depth = weights.shape
    panels = empty_on_lines((count, -(-rows // (GATES * block)), depth, GATES, block), weights.dtype)
    fill_panels(panels.transpose(0, 3, 1, 2, 4), weights)
    return panels


def pack_bias(bias: Array, padded: int) -> Array:
    """Packs [directions, 2 * GATES * hidden]: adds the biases of input and hidden state, and pads the units to
    ``padded``."""
    sums = bias.reshape(len(bias), 2, GATES, -1).sum(axis=1)
    return np.pad(sums, [(0, 0), (0, 0), (0, padded - sums.shape[2])])


class GatesLSTM(Recurrent):
    family = "recurrent_gates"
    version = "1.0"
    ops = frozenset({"LSTM"})
    dtypes = frozenset({DType.FLOAT32, DType.INT32, DType.INT64})
    rank = 45

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if not all(problem.constant[i] for i in (1, 2, 3) if problem.input(i) is not None):
            return "weights and biases are constant"
        if problem.input(7) is not None or problem.attrs.get("clip") or problem.attrs.get("input_forget"):
            return "has no peepholes, no clip and no coupled gates"
        names = [name.lower() for name in problem.attrs.get("activations") or ()]
        if names != [name.lower() for name in cells.CELLS["LSTM"].activations] * (len(names) // 3):
            return "its activations are Sigmoid, Tanh and Tanh"
        reason = super().refuse(problem, target)
        if reason is not None or not problem.is_static:
            return reason
        steps, batch = _extent(problem)
        return f"a single step of {batch} sequences is a product of matrices" if steps == 1 and batch > FEW else None

    def default(self, problem: Problem, target: Target) -> Config:
        steps, batch = _extent(problem)
        directions, _, hidden = tensor(problem.inputs[2]).dims
        # A tile takes the time of its rows, and of reading the weights. There should be a tile for every thread.
        most = lesser((target.registers - 3) // GATES, MOST_ROWS, -(-batch * directions // target.units))
        rows = min(range(1, greater(most, 1) + 1), key=lambda rows: -(-batch // rows) * (rows + 1))
        panel = 2 * target.vector_bytes * GATES * hidden
        two = rows == 1 and _wide(problem, target) > 1 and (steps == 1 or panel <= NEAR)
        return {"rows": rows, "vectors": 2 if two else 1}

    def space(self, problem: Problem, target: Target) -> Space:
        wide = _wide(problem, target)
        return Space(
            {"rows": list(range(1, MOST_ROWS + 1)), "vectors": [n for n in (1, 2, 4) if n <= wide]},
            lambda c: c["rows"] * c["vectors"] * GATES <= target.registers - 3,  # type: ignore[operator]
            version=f"sums in {target.registers} registers",
        )

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        writer = self._writer(problem, config, target)
        sizes, block = writer.sizes, writer.block
        by_unit = Packing(f"recurrent_gates.{block}", partial(pack, block=block))
        projected = super().packings(problem, _as_projected(config, problem, target), target)
        found = {1: by_unit if sizes.fused else projected[1], 2: by_unit}
        if problem.input(3) is not None:
            found[3] = Packing(f"recurrent_gates.bias.{sizes.padded}", partial(pack_bias, padded=sizes.padded))
        return found

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        writer = self._writer(problem, config, target)
        if not writer.sizes.batch or not writer.sizes.hidden:
            return []
        return [*([writer.project()] if writer.sizes.steps > 1 else []), writer.recur()]

    def _writer(self, problem: Problem, config: Config, target: Target) -> GatesWriter:
        sizes = RecurrentSizes.of(problem, _as_projected(config, problem, target), target)
        return GatesWriter(problem, sizes, target, self.specialise, int(config["vectors"]))


def _extent(problem: Problem) -> tuple[int, int]:
    """The number of steps, and of sequences."""
    first, second, _ = tensor(problem.inputs[0]).dims
    return (second, first) if problem.attrs.get("layout", 0) else (first, second)


def _wide(problem: Problem, target: Target) -> int:
    """The number of vectors in a block of the input's product: of one gate, and not mostly padding."""
    hidden, wide = tensor(problem.inputs[2]).dims[2], 4
    while wide > 1 and hidden * tensor(problem.inputs[0]).dtype.itemsize <= wide * target.vector_bytes // 2:
        wide //= 2
    return wide


def _as_projected(config: Config, problem: Problem, target: Target) -> Config:
    """The config of `Recurrent` for the product of the input."""
    return {"rows": config["rows"], "vectors": _wide(problem, target), "chains": 1}


@dataclass(frozen=True)
class GatesWriter(RecurrentWriter):
    #: the number of vectors of each gate in a tile of sums
    vectors: int

    @property
    def block(self) -> int:
        """The number of hidden units of a panel."""
        return self.vectors * self.sizes.lanes

    @property
    def blocks(self) -> int:
        return -(-self.sizes.hidden // self.block)

    @property
    def _states(self) -> int:
        """The number of elements of a state of all work-items."""
        sizes = self.sizes
        return sizes.directions * sizes.tiles * self._parts() * sizes.rows * sizes.padded

    def recur(self) -> EmittedLaunch:
        sizes, problem = self.sizes, self.problem
        source = Source("recur", self.specialise)
        source.fixed(REAL=COMPUTE[self.real], BLOCK=self.block, GATES=GATES, ROWS=sizes.rows)
        # Fewer sums would wait for each other; then each exists twice, over alternating depths.
        chains = 2 if sizes.rows * GATES * self.vectors < BUSY else 1
        source.fixed(VECTORS=self.vectors, LANES=sizes.lanes, SUMS=GATES * self.vectors, CHAINS=chains)
        source.function(_MULTIPLY.replace("ALIGNED", str(self.real.itemsize)))
        source.function(_ACTIVATIONS)
        parts, states = self._parts(), self._states
        source.buffer("r", self.real, In(2))
        if sizes.fused:
            source.buffer("x", self.real, In(0))
            source.buffer("w", self.real, In(1))
        else:
            source.buffer("projected", self.real, self._projected())
        source.buffer("hiddens", self.real, self._scratch("hiddens", 2 * states))
        source.dims(STEPS=sizes.steps, BATCH=sizes.batch, HIDDEN=sizes.hidden, PADDED=sizes.padded)
        source.dims(FEATURES=sizes.features, TILES=sizes.tiles, BLOCKS=self.blocks, PARTS=parts)
        source.dims(PER_PART=-(-self.blocks // parts), STATES=states)
        self._strides(source)
        first = [_ZERO if sizes.fused else _PROJECTED]
        if problem.input(3) is not None:
            source.buffer("biases", self.real, In(3))
            first.append(_BIASES)
        source.buffer("y", self.real, Out())
        products = [_INPUT, _HIDDEN] if sizes.fused else [_HIDDEN]
        text = [BEGIN, *self._lengths(source), self._initial(source)]
        text += ["for (int t = 0; t < STEPS; t++) {", self._times(source)]
        text += [_STATES, "for (int i = block; i < blocks_end; i++) {", _PANEL, *first, *products, _STEP, "}\n}"]
        source.add("\n".join([*text, "hiddens += (STEPS & 1) * STATES;", self._last(source)]))
        return source.call([sizes.directions * sizes.tiles, parts])

    def _initial(self, source: Source) -> str:
        """Like `RecurrentWriter._initial`, but the states have whole blocks."""
        source.buffer("cells", self.real, self._scratch("cells", self._states))
        values = []
        for i, name in ((5, "hiddens"), (6, "cells")):
            values.append("0")
            if self.problem.input(i) is not None:
                source.buffer(f"initial_{name}", self.real, In(i))
                values[-1] = f"j < HIDDEN ? initial_{name}[at + j] : 0"
        return f"""for (int m = 0; m < ROWS; m++) {{
  int at UNUSED = d * S_D + sequence(m) * S_B, to = (item * ROWS + m) * PADDED;
  for (int j = 0; j < PADDED; j++) {{ hiddens[to + j] = {values[0]}; cells[to + j] = {values[1]}; }}
}}"""


_MULTIPLY = """vector_of(REAL, LANES, V);
typedef V VU __attribute__((aligned(ALIGNED)));
vector_of(u32, LANES, VI);
INLINE void multiply(V sums[ROWS][SUMS], GLOBAL const REAL* panel, int depth, GLOBAL const REAL** from) {
  V parts[CHAINS][ROWS][SUMS];
  UNROLL for (int c = 0; c < CHAINS; c++)
    UNROLL for (int m = 0; m < ROWS; m++)
      UNROLL for (int n = 0; n < SUMS; n++) parts[c][m][n] = 0;
  int k = 0;
  for (; k + CHAINS <= depth; k += CHAINS)
    UNROLL for (int c = 0; c < CHAINS; c++)
      UNROLL for (int n = 0; n < SUMS; n++) {
        V w = LOADV(panel + ((k + c) * SUMS + n) * LANES);
        UNROLL for (int m = 0; m < ROWS; m++) parts[c][m][n] += from[m][k + c] * w;
      }
  for (; k < depth; k++)
    UNROLL for (int n = 0; n < SUMS; n++) {
      V w = LOADV(panel + (k * SUMS + n) * LANES);
      UNROLL for (int m = 0; m < ROWS; m++) parts[0][m][n] += from[m][k] * w;
    }
  UNROLL for (int c = 0; c < CHAINS; c++)
    UNROLL for (int m = 0; m < ROWS; m++)
      UNROLL for (int n = 0; n < SUMS; n++) sums[m][n] += parts[c][m][n];
}"""

#: The functions of the prelude for vectors: a loop over so few units as these would stay scalar.
_ACTIVATIONS = """INLINE V sigmoid(V x) {
  V c = x > 87.0f ? (V)(-87.0f) : -x; c = c > 87.0f ? (V)(87.0f) : c;
  V t = c * 1.44269504089f + F32_ROUNDER, n = t - F32_ROUNDER, r = c - n * 0.693359375f + n * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f; p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  V e = p * (r * r) + r + 1.0f;
  return 1.0f / (1.0f + (e + e) * CAST_BITS((CAST_BITS(t, VI) << 23) + (126u << 23), V));
}
INLINE V tangent(V x) {
  V c = x > 8.4375f ? (V)(8.4375f) : x; c = c < -8.4375f ? (V)(-8.4375f) : c;
  V s = c * c, p = s * -2.76076847742355e-16f + 2.00018790482477e-13f;
  V q = s * 1.19825839466702e-06f + 1.18534705686654e-04f;
  p = p * s - 8.60467152213735e-11f; p = p * s + 5.12229709037114e-08f; p = p * s + 1.48572235717979e-05f;
  p = p * s + 6.37261928875436e-04f; p = p * s + 4.89352455891786e-03f;
  q = q * s + 2.26843463243900e-03f; q = q * s + 4.89352518554385e-03f;
  V v = c * p / q;
  v = v > 1.0f ? (V)(1.0f) : v;
  return v < -1.0f ? (V)(-1.0f) : v;
}"""

#: Pointers to the hidden state and to the next one. There are two, because finished units must not change values that
#: other units still read.
_STATES = """GLOBAL const REAL* from[ROWS];
UNROLL for (int m = 0; m < ROWS; m++) from[m] = hiddens + (t & 1) * STATES + (item * ROWS + m) * PADDED;
GLOBAL REAL* next = hiddens + (~t & 1) * STATES + item * ROWS * PADDED;"""

_PANEL = """int k = t & 1 ? block + blocks_end - 1 - i : i;
int units = HIDDEN - k * BLOCK < BLOCK ? HIDDEN - k * BLOCK : BLOCK;
V sums[ROWS][SUMS];"""

_ZERO = """UNROLL for (int m = 0; m < ROWS; m++)
  UNROLL for (int n = 0; n < SUMS; n++) sums[m][n] = 0;"""
_INPUT = """{
  GLOBAL const REAL* inputs[ROWS];
  UNROLL for (int m = 0; m < ROWS; m++) inputs[m] = x + (times[m] * X_T + sequence(m) * X_B) * FEATURES;
  multiply(sums, w + (d * BLOCKS + k) * FEATURES * GATES * BLOCK, FEATURES, inputs);
}"""
_PROJECTED = """UNROLL for (int m = 0; m < ROWS; m++) {
  GLOBAL const REAL* in = projected + (d * STEPS * BATCH + times[m] * X_T + sequence(m) * X_B) * GATES * PADDED;
  UNROLL for (int g = 0; g < GATES; g++)
    UNROLL for (int n = 0; n < VECTORS; n++)
      sums[m][g * VECTORS + n] = LOADV(in + g * PADDED + k * BLOCK + n * LANES);
}"""
_BIASES = """UNROLL for (int g = 0; g < GATES; g++)
  UNROLL for (int n = 0; n < VECTORS; n++) {
    V bias = LOADV(biases + (d * GATES + g) * PADDED + k * BLOCK + n * LANES);
    UNROLL for (int m = 0; m < ROWS; m++) sums[m][g * VECTORS + n] += bias;
  }"""
_HIDDEN = "multiply(sums, r + (d * BLOCKS + k) * HIDDEN * GATES * BLOCK, HIDDEN, from);"

#: A sequence that has ended keeps its state, and its output is zero.
_STEP = """UNROLL for (int m = 0; m < ROWS; m++) if (first + m < BATCH) {
  GLOBAL REAL* cell = cells + (item * ROWS + m) * PADDED + k * BLOCK;
  GLOBAL REAL* after = next + m * PADDED + k * BLOCK;
  GLOBAL REAL* to = y + times[m] * Y_T + d * Y_D + sequence(m) * Y_B + k * BLOCK;
  UNROLL for (int n = 0; n < VECTORS; n++) {
    V memory = LOADV(cell + n * LANES), hidden = LOADV(from[m] + k * BLOCK + n * LANES), value = 0;
    if (alive[m]) {
      memory = sigmoid(sums[m][2 * VECTORS + n]) * memory + sigmoid(sums[m][n]) * tangent(sums[m][3 * VECTORS + n]);
      hidden = value = sigmoid(sums[m][VECTORS + n]) * tangent(memory);
    }
    STOREV(cell + n * LANES, memory);
    STOREV(after + n * LANES, hidden);
    if (units == BLOCK) STOREV(to + n * LANES, value);
  }
  if (units < BLOCK) for (int j = 0; j < units; j++) to[j] = alive[m] ? after[j] : 0;
}"""

SOLVERS = both(GatesLSTM)
