"""LSTM, GRU and RNN: one product for the input's part of all gates, then one launch that loops over all steps.

Weights lie in panels: [direction][gate][block of hidden units][depth][units of the block]. A block is as wide as the
tile of sums that stays in registers. A work-item of the recurrence has some sequences of a batch in one direction, and
computes all their steps. With a single step no work-item depends on another. Then the hidden units are divided among
work-items too, and the input's product is part of the same launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tunewright.devices.base import Target, empty_on_lines
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType, TensorType
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..reduction.norm import FLOATS, MOST_ITEMS
from ..source.base import MOST_ELEMENTS, CSolver, both
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Scratch, Source
from . import recurrent_cell as cells

#: multiplications that are worth a separate work-item
WORTH = 1 << 17


@dataclass(frozen=True)
class RecurrentSizes:
    """The sizes of a static problem with a config."""

    steps: int
    batch: int
    features: int
    hidden: int
    directions: int
    gates: int
    layout: int
    #: Sequences, vectors of hidden units and their lanes in a tile of sums; chains of sums over alternating depths.
    rows: int
    vectors: int
    lanes: int
    chains: int

    @property
    def block(self) -> int:
        """The number of hidden units in a panel."""
        return self.vectors * self.lanes

    @property
    def blocks(self) -> int:
        return -(-self.hidden // self.block)

    @property
    def padded(self) -> int:
        """The number of hidden units, with those that fill up the last block."""
        return self.blocks * self.block

    @property
    def panels(self) -> int:
        return self.gates * self.blocks

    @property
    def tiles(self) -> int:
        """The number of tiles of sequences in a direction."""
        return -(-self.batch // self.rows)

    @property
    def fused(self) -> bool:
        """Whether the recurrence itself computes the input's product."""
        return self.steps == 1

    @staticmethod
    def of(problem: Problem, config: Config, target: Target) -> RecurrentSizes:
        x, w, r = (tensor(problem.inputs[i]).dims for i in range(3))
        layout = int(problem.attrs.get("layout", 0))
        steps, batch = (x[1], x[0]) if layout else (x[0], x[1])
        lanes = target.vector_bytes // np.dtype(_real_type(problem).numpy).itemsize
        return RecurrentSizes(
            steps, batch, x[2], r[2], w[0], cells.CELLS[problem.op].gates, layout,
            int(config["rows"]), int(config["vectors"]), lanes, int(config["chains"]),
        )  # fmt: skip


def _real_type(problem: Problem) -> DType:
    """The type of all arithmetic."""
    return DType.FLOAT64 if tensor(problem.inputs[0]).dtype is DType.FLOAT64 else DType.FLOAT32


def pack(weights: Array, gates: int, block: int, dtype: np.dtype[Any]) -> Array:
    """Packs [directions, gates * hidden, depth] as panels; zeros fill up a last block."""
    count, rows, depth = weights.shape
    panels = empty_on_lines((count, gates, -(-rows // (gates * block)), depth, block), dtype)
    fill_panels(panels, weights)
    return panels


def fill_panels(panels: Array, weights: Array) -> None:
    """Copies weights into panels [direction][gate][block][depth][units of the block]."""
    count, gates, blocks, depth, block = panels.shape
    split = weights.reshape(count, gates, -1, depth)
    for number in range(blocks):
        units = split[:, :, number * block : (number + 1) * block].swapaxes(-1, -2)
        panels[:, :, number, :, : units.shape[-1]] = units
        panels[:, :, number, :, units.shape[-1] :] = 0


class Recurrent(CSolver):
    family = "recurrent"
    ops = frozenset({"LSTM", "GRU", "RNN"})
    dtypes = FLOATS | {DType.INT32, DType.INT64}
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "takes no epilogue"
        for i, type in enumerate(problem.main_inputs):
            if isinstance(type, TensorType) and (type.dtype in FLOATS) == (i == 4):
                return f"input {i} is {type.dtype}"
        if len(problem.outputs) > 1 + len(cells.CELLS[problem.op].states):
            return f"makes no {len(problem.outputs)} outputs"
        reason = cells.why_not(problem)
        if reason is not None or not problem.is_static:
            return reason
        x, w = tensor(problem.inputs[0]), tensor(problem.inputs[1])
        if w.dims[0] != cells.directions(problem)[0]:
            return f"weights {w} for {cells.directions(problem)[0]} directions"
        filled = w.dims[1] + cells.CELLS[problem.op].gates * 8 * target.vector_bytes // 4
        if x.dims[0] * x.dims[1] * w.dims[0] * filled > MOST_ELEMENTS:
            return "the gates of all steps are too many"
        return None

    def default(self, problem: Problem, target: Target) -> Config:
        x, w, r = (tensor(problem.inputs[i]).dims for i in range(3))
        sequences = x[0 if problem.attrs.get("layout", 0) else 1] * w[0]
        rows = 1 if sequences <= target.units else 2 if sequences <= 2 * target.units else 4
        vectors = 2 if rows == 4 and target.registers < 32 else 4
        while vectors > 1 and r[2] * _real_type(problem).itemsize <= vectors * target.vector_bytes // 2:
            vectors //= 2  # a block should not be mostly padding
        return {"rows": rows, "vectors": vectors, "chains": lesser(4, greater(1, 8 // (rows * vectors)))}

    def space(self, problem: Problem, target: Target) -> Space:
        return Space(
            {"rows": [1, 2, 3, 4, 6], "vectors": [1, 2, 4, 8], "chains": [1, 2, 4]},
            lambda c: c["rows"] * c["vectors"] * c["chains"] <= target.registers - 3,  # type: ignore[operator]
            version=f"sums in {target.registers} registers",
        )

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        sizes, dtype = RecurrentSizes.of(problem, config, target), _real_type(problem).numpy
        packing = Packing(
            f"recurrent.{sizes.gates}x{sizes.block}.{dtype}",
            partial(pack, gates=sizes.gates, block=sizes.block, dtype=dtype),
        )
        return {i: packing for i in (1, 2) if problem.constant[i]}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        sizes = RecurrentSizes.of(problem, config, target)
        if not sizes.batch or not sizes.hidden:
            return []
        writer = RecurrentWriter(problem, sizes, target, self.specialise)
        calls = [writer.panels(name, i) for name, i in (("w", 1), ("r", 2)) if not problem.constant[i]]
        if tensor(problem.inputs[0]).dtype is not writer.real:
            calls.append(writer.widen())
        if sizes.steps > 1:
            calls.append(writer.project())
        return [*calls, writer.recur()]


@dataclass(frozen=True)
class RecurrentWriter:
    """Writes the launches of one problem."""

    problem: Problem
    sizes: RecurrentSizes
    target: Target
    specialise: bool

    @property
    def real(self) -> DType:
        return _real_type(self.problem)

    def _source(self, name: str) -> Source:
        source = Source(name, self.specialise)
        source.fixed(REAL=COMPUTE[self.real], BLOCK=self.sizes.block)
        return source

    def _scratch(self, name: str, elements: int) -> Scratch:
        return Scratch(name, elements * self.real.itemsize)

    # -- preparation -------------------------------------------------------------------------------------------------
    def panels(self, name: str, i: int) -> EmittedLaunch:
        """The launch that arranges weights which are not constant, as `pack` arranges constants."""
        sizes, type = self.sizes, tensor(self.problem.inputs[i])
        source = self._source("panels")
        source.buffer("w", type.dtype, In(i))
        source.buffer("panels", self.real, self._panels(name, i))
        source.dims(BLOCKS=sizes.blocks, HIDDEN=sizes.hidden, DEPTH=type.dims[2])
        source.add(f"""int panel = GID(0), gate = panel / BLOCKS, from = panel % BLOCKS * BLOCK;
GLOBAL REAL* to = panels + panel * DEPTH * BLOCK;
for (int k = 0; k < DEPTH; k++) for (int n = 0; n < BLOCK; n++) {{
  int unit = from + n;
  to[k * BLOCK + n] = unit < HIDDEN ? {source.load("w", "(gate * HIDDEN + unit) * DEPTH + k")} : 0;
}}""")
        return source.call([sizes.directions * sizes.panels])

    def _panels(self, name: str, i: int) -> In | Scratch:
        depth = tensor(self.problem.inputs[i]).dims[2]
        if self.problem.constant[i]:
            return In(i)
        return self._scratch(f"panels_{name}", self.sizes.directions * self.sizes.panels * self.sizes.block * depth)

    def widen(self) -> EmittedLaunch:
        """The launch that converts the input to the type of the arithmetic."""
        x = tensor(self.problem.inputs[0])
        source = self._source("widen")
        source.buffer("narrow", x.dtype, In(0))
        source.buffer("wide", self.real, self._scratch("x", x.size))
        chunk = greater(8192, -(-x.size // MOST_ITEMS))
        source.dims(SIZE=x.size, CHUNK=chunk)
        source.add(f"""int begin = GID(0) * CHUNK, end = SIZE - begin < CHUNK ? SIZE : begin + CHUNK;
for (int i = begin; i < end; i++) wide[i] = {source.load("narrow", "i")};""")
        return source.call([-(-x.size // chunk)])

    def _x(self) -> In | Scratch:
        x = tensor(self.problem.inputs[0])
        return In(0) if x.dtype is self.real else self._scratch("x", x.size)

    # -- the input's part --------------------------------------------------------------------------------------------
    def _tile(self, source: Source, rows: int, chains: int) -> None:
        """Adds the function `tile`: sums of ROWS vectors times one panel, in registers."""
        sizes = self.sizes
        source.fixed(ROWS=rows, VECTORS=sizes.vectors, LANES=sizes.lanes, CHAINS=chains)
        source.function(f"""vector_of(REAL, LANES, V);
typedef V VU __attribute__((aligned({self.real.itemsize})));
INLINE void tile(GLOBAL const REAL* panel, int depth, GLOBAL const REAL** from, GLOBAL REAL** to) {{
  V sums[CHAINS][ROWS][VECTORS];
  UNROLL for (int c = 0; c < CHAINS; c++)
    UNROLL for (int m = 0; m < ROWS; m++)
      UNROLL for (int n = 0; n < VECTORS; n++) sums[c][m][n] = 0;
  int k = 0;
  for (; k + CHAINS <= depth; k += CHAINS) {{
    UNROLL for (int c = 0; c < CHAINS; c++)
      UNROLL for (int n = 0; n < VECTORS; n++) {{
        V w = LOADV(panel + (k + c) * BLOCK + n * LANES);
        UNROLL for (int m = 0; m < ROWS; m++) sums[c][m][n] += from[m][k + c] * w;
      }}
  }}
  for (; k < depth; k++) {{
    UNROLL for (int n = 0; n < VECTORS; n++) {{
      V w = LOADV(panel + k * BLOCK + n * LANES);
      UNROLL for (int m = 0; m < ROWS; m++) sums[0][m][n] += from[m][k] * w;
    }}
  }}
  UNROLL for (int m = 0; m < ROWS; m++)
    UNROLL for (int n = 0; n < VECTORS; n++) {{
      V sum = sums[0][m][n];
      UNROLL for (int c = 1; c < CHAINS; c++) sum += sums[c][m][n];
      STOREV(to[m] + n * LANES, sum);
    }}
}}""")

    def _projected(self) -> Scratch:
        sizes = self.sizes
        return self._scratch("projected", sizes.directions * sizes.steps * sizes.batch * sizes.gates * sizes.padded)

    def project(self) -> EmittedLaunch:
        """The launch of [rows of the input] x [panels of all directions]; a work-item has some of both."""
        sizes = self.sizes
        rows = sizes.steps * sizes.batch
        source = self._source("project")
        self._tile(source, greater(1, (self.target.registers - 4) // sizes.vectors), 1)
        source.buffer("x", self.real, self._x())
        source.buffer("w", self.real, self._panels("w", 1))
        source.buffer("projected", self.real, self._projected())
        panels = sizes.directions * sizes.panels
        worth = greater(1, rows * panels * sizes.block * sizes.features // WORTH)
        items = lesser(worth, 8 * self.target.units)
        wide = -(-panels // lesser(items, panels))
        # enough rows to keep a panel in the cache
        high = -(-rows // greater(1, lesser(items * wide // panels, -(-rows // 16))))
        source.dims(N_ROWS=rows, FEATURES=sizes.features, PANELS=sizes.panels, GATES=sizes.panels * sizes.block)
        source.dims(ALL_PANELS=panels, WIDE=wide, HIGH=high)
        source.add("""int first = GID(0) * WIDE, last = ALL_PANELS - first < WIDE ? ALL_PANELS : first + WIDE;
int begin = GID(1) * HIGH, end = N_ROWS - begin < HIGH ? N_ROWS : begin + HIGH;
for (int panel = first; panel < last; panel++) {
  GLOBAL REAL* to = projected + panel / PANELS * N_ROWS * GATES + panel % PANELS * BLOCK;
  for (int row = begin; row < end; row += ROWS) {
    GLOBAL const REAL* inputs[ROWS];
    GLOBAL REAL* outputs[ROWS];
    UNROLL for (int m = 0; m < ROWS; m++) {
      int at = row + m < end ? row + m : end - 1;
      inputs[m] = x + at * FEATURES;
      outputs[m] = to + at * GATES;
    }
    tile(w + panel * FEATURES * BLOCK, FEATURES, inputs, outputs);
  }
}""")
        return source.call([-(-panels // wide), -(-rows // high)])

    # -- the recurrence ----------------------------------------------------------------------------------------------
    def _parts(self) -> int:
        """The number of work-items among which the hidden units of a tile of sequences are divided."""
        sizes = self.sizes
        if not sizes.fused or self._two_products:
            return 1
        work = sizes.rows * sizes.gates * sizes.padded * (sizes.hidden + sizes.features)
        spare = -(-4 * self.target.units // (sizes.tiles * sizes.directions))
        return greater(1, lesser(work // (WORTH // 2), spare, sizes.blocks))

    @property
    def _two_products(self) -> bool:
        return self.problem.op == "GRU" and not self.problem.attrs.get("linear_before_reset", 0)

    def recur(self) -> EmittedLaunch:
        sizes, problem = self.sizes, self.problem
        source = self._source("recur")
        self._tile(source, sizes.rows, sizes.chains)
        source.function(cells.functions(problem, COMPUTE[self.real]))
        parts = self._parts()
        per_part = -(-sizes.blocks // parts)
        states = sizes.directions * sizes.tiles * parts * sizes.rows * sizes.padded
        source.buffer("r", self.real, self._panels("r", 2))
        if sizes.fused:
            source.buffer("x", self.real, self._x())
            source.buffer("w", self.real, self._panels("w", 1))
            source.buffer("projected", self.real, self._scratch("inputs", states * sizes.gates))
        else:
            source.buffer("projected", self.real, self._projected())
        source.buffer("gates", self.real, self._scratch("gates", states * sizes.gates))
        source.buffer("hiddens", self.real, self._scratch("hiddens", states))
        source.dims(STEPS=sizes.steps, BATCH=sizes.batch, HIDDEN=sizes.hidden, PADDED=sizes.padded)
        source.dims(FEATURES=sizes.features, TILES=sizes.tiles, BLOCKS=sizes.blocks, PARTS=parts, PER_PART=per_part)
        self._strides(source)
        source.fixed(GATES=sizes.gates)
        lines = [BEGIN, *self._lengths(source), self._initial(source)]
        lines += ["for (int t = 0; t < STEPS; t++) {", self._times(source)]
        if sizes.fused:
            lines.append(_FUSED)
        if self._two_products:
            source.buffer("resets", self.real, self._scratch("resets", states))
            lines += [
                _product(0, 2, "hiddens"), self._step(source, cells.GRU_FIRST, False),
                _product(2, 3, "resets"), self._step(source, cells.GRU_SECOND),
            ]  # fmt: skip
        else:
            lines += [_product(0, sizes.gates, "hiddens"), self._step(source, self._cell(source))]
        lines += ["}", self._last(source)]
        source.add("\n".join(lines))
        return source.call([sizes.directions * sizes.tiles, parts])

    def _strides(self, source: Source) -> None:
        """Declares the strides of input rows, of the output and of states, by time, direction and sequence."""
        s = self.sizes
        if s.layout:
            source.dims(X_T=1, X_B=s.steps, Y_T=s.directions * s.hidden, Y_D=s.hidden)
            source.dims(Y_B=s.steps * s.directions * s.hidden, S_D=s.hidden, S_B=s.directions * s.hidden)
        else:
            source.dims(X_T=s.batch, X_B=1, Y_T=s.directions * s.batch * s.hidden, Y_D=s.batch * s.hidden)
            source.dims(Y_B=s.hidden, S_D=s.batch * s.hidden, S_B=s.hidden)

    def _initial(self, source: Source) -> str:
        """Statements that set the states before the first step.

        A last tile repeats the last sequence for its surplus rows, whose results are not stored.
        """
        problem, sizes = self.problem, self.sizes
        copies = []
        for i, name in zip(cells.CELLS[problem.op].states, ("hiddens", "cells"), strict=False):
            value = "0"
            if name == "cells":
                states = sizes.directions * sizes.tiles * self._parts() * sizes.rows * sizes.padded
                source.buffer("cells", self.real, self._scratch("cells", states))
            if problem.input(i) is not None:
                source.buffer(f"initial_{name}", tensor(problem.inputs[i]).dtype, In(i))
                value = source.load(f"initial_{name}", "at + j")
            copies.append(f"{name}[(item * ROWS + m) * PADDED + j] = {value};")
        return f"""for (int m = 0; m < ROWS; m++) {{
  int at UNUSED = d * S_D + sequence(m) * S_B;
  for (int j = 0; j < HIDDEN; j++) {{ {" ".join(copies)} }}
}}"""

    def _lengths(self, source: Source) -> list[str]:
        """Statements that report a length which the sequences cannot have."""
        if self.problem.input(4) is None:
            return []
        source.buffer("lengths", tensor(self.problem.inputs[4]).dtype, In(4))
        return [
            """for (int m = 0; m < ROWS; m++)
  if (lengths[sequence(m)] < 0 || lengths[sequence(m)] > STEPS)
    wrong(report, WRONG_LENGTH, lengths[sequence(m)], STEPS);"""
        ]

    def _times(self, source: Source) -> str:
        """Statements that compute the input step of each sequence; a reversed one starts at the last step of its
        length."""
        length = "STEPS"
        if self.problem.input(4) is not None:
            length = "lengths[sequence(m)]"
        source.dims(BACKWARDS=cells.directions(self.problem)[1])
        return f"""int times[ROWS], alive[ROWS];
UNROLL for (int m = 0; m < ROWS; m++) {{
  int length = {length};
  length = length < 0 ? 0 : length > STEPS ? STEPS : length;
  alive[m] = t < length;
  times[m] = alive[m] && (BACKWARDS >> d & 1) ? length - 1 - t : t;
}}"""

    def _cell(self, source: Source) -> str:
        problem = self.problem
        if problem.op == "RNN":
            return cells.RNN
        if problem.op == "GRU":
            inner = f" + {source.load('b', '(d * 6 + 5) * HIDDEN + j')}" if self._bias(source) else ""
            return cells.gru_linear(inner)
        peephole = []
        if problem.input(7) is not None:
            source.buffer("p", tensor(problem.inputs[7]).dtype, In(7))
            peephole = [source.load("p", f"(d * 3 + {k}) * HIDDEN + j") for k in range(3)]
        return cells.lstm(bool(problem.attrs.get("input_forget", 0)), peephole)

    def _bias(self, source: Source) -> bool:
        if self.problem.input(3) is None:
            return False
        source.buffer("b", tensor(self.problem.inputs[3]).dtype, In(3))
        return True

    def _inputs(self, source: Source) -> str:
        """Macros for the contribution of the input and the biases to the gates."""
        gates, lines = self.sizes.gates, []
        for g in range(gates):
            text = f"in[{g} * PADDED + j]"
            if self._bias(source):
                text += f" + {source.load('b', f'(d * {2 * gates} + {g}) * HIDDEN + j')}"
                if self._two_products or self.problem.op != "GRU" or g < 2:
                    text += f" + {source.load('b', f'(d * {2 * gates} + {gates + g}) * HIDDEN + j')}"
            lines.append(f"#define input_{g} ({text})")
        return "\n".join([*lines, "#define input(g) input_##g", "#define gate(g) mine[g * PADDED + j]"])

    def _step(self, source: Source, cell: str, last: bool = True) -> str:
        """The element-wise part for each sequence. One that has ended keeps its state, and its output is zero."""
        source.function(self._inputs(source))
        where = "projected + ((d * STEPS * BATCH + times[m] * X_T + sequence(m) * X_B) * GATES) * PADDED"
        if self.sizes.fused:
            where = "projected + (item * ROWS + m) * GATES * PADDED"
        mine = "gates + (item * ROWS + m) * GATES * PADDED"
        pointers = [f"GLOBAL REAL* mine = {mine};", f"GLOBAL const REAL* in = {where};"]
        own = {"hidden": "hiddens"}
        if self.problem.op == "LSTM":
            own["cell"] = "cells"
        if self._two_products and not last:
            own["reset"] = "resets"
        pointers += [f"GLOBAL REAL* {k} = {v} + (item * ROWS + m) * PADDED;" for k, v in own.items()]
        ended = ""
        if last:
            source.buffer("y", tensor(self.problem.outputs[0]).dtype, Out())
            pointers.append("int y_at = times[m] * Y_T + d * Y_D + sequence(m) * Y_B;")
            cell += f"\nhidden[j] = value;\n{source.store('y', 'y_at + j', 'value')}"
            ended = f"else for (int j = begin; j < end; j++) {source.store('y', 'y_at + j', '0')}"
        return f"""for (int m = 0; m < ROWS && first + m < BATCH; m++) {{
  {" ".join(pointers)}
  if (alive[m]) for (int j = begin; j < end; j++) {{
    {cell}
  }}
  {ended}
}}"""

    def _last(self, source: Source) -> str:
        """Statements that store the states after the last step, where they are outputs."""
        copies = []
        for i, name in enumerate(("hiddens", "cells"), start=1):
            if i < len(self.problem.outputs):
                source.buffer(f"last_{name}", tensor(self.problem.outputs[i]).dtype, Out(i))
                copies.append(source.store(f"last_{name}", "at + j", f"{name}[(item * ROWS + m) * PADDED + j]"))
        return f"""for (int m = 0; m < ROWS && first + m < BATCH; m++) {{
  int at UNUSED = d * S_D + sequence(m) * S_B;
  for (int j = begin; j < end; j++) {{ {" ".join(copies)} }}
}}"""


#: Computes the sequences, direction and hidden units of the work-item.
BEGIN = """#define sequence(m) (first + (m) < BATCH ? first + (m) : BATCH - 1)
int item = GID(0) * PARTS + GID(1), d = GID(0) / TILES, first = GID(0) % TILES * ROWS;
int block = GID(1) * PER_PART, blocks_end = BLOCKS - block < PER_PART ? BLOCKS : block + PER_PART;
int begin = block * BLOCK, end = blocks_end * BLOCK < HIDDEN ? blocks_end * BLOCK : HIDDEN;"""


def _product(first: int, last: int, vectors: str) -> str:
    """Statements that multiply vectors of hidden size with the weights of some gates."""
    return f"""for (int g = {first}; g < {last}; g++) for (int k = block; k < blocks_end; k++) {{
  GLOBAL const REAL* from[ROWS];
  GLOBAL REAL* to[ROWS];
  UNROLL for (int m = 0; m < ROWS; m++) {{
    from[m] = {vectors} + (item * ROWS + m) * PADDED;
    to[m] = gates + ((item * ROWS + m) * GATES + g) * PADDED + k * BLOCK;
  }}
  tile(r + ((d * GATES + g) * BLOCKS + k) * HIDDEN * BLOCK, HIDDEN, from, to);
}}"""


#: computes the input's part of this work-item's hidden units
_FUSED = """for (int g = 0; g < GATES; g++) for (int k = block; k < blocks_end; k++) {
  GLOBAL const REAL* from[ROWS];
  GLOBAL REAL* to[ROWS];
  UNROLL for (int m = 0; m < ROWS; m++) {
    from[m] = x + (times[m] * X_T + sequence(m) * X_B) * FEATURES;
    to[m] = projected + ((item * ROWS + m) * GATES + g) * PADDED + k * BLOCK;
  }
  tile(w + ((d * GATES + g) * BLOCKS + k) * FEATURES * BLOCK, FEATURES, from, to);
}"""

SOLVERS = both(Recurrent)
