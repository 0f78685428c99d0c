"""BatchNormalization that could not be folded into a convolution."""

from __future__ import annotations

import math

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import PLAIN, TensorType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor

from ..source.base import CSolver, both, layout_of
from ..source.emit import EmittedLaunch, In, Out, Source
from .norm import BLOCK, FLOATS, MOST_ITEMS

#: Channels whose factors a work-item keeps at once where the channels are innermost.
LANES = 256


class BatchNorm(CSolver):
    """y = factor[c] x + shift[c]. Channels are rows of pixels, or (in blocks, or without pixels) neighbours."""

    family = "norm_batch"
    ops = frozenset({"BatchNormalization"})
    dtypes = FLOATS
    layouts = frozenset({PLAIN.name, "blocked"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "takes no epilogue"
        x = problem.input(0)
        training = bool(problem.attrs.get("training_mode", 0))
        if len(problem.outputs) > (3 if training else 1):
            return f"makes no {len(problem.outputs)} outputs"
        if isinstance(x, TensorType) and x.rank is not None and x.rank < 2:
            return f"{x} has no channels"
        blocked = layout_of(x) != PLAIN
        if blocked and training:
            return "takes statistics of plain tensors only"
        if layout_of(problem.outputs[0]) != layout_of(x):
            return "input and output differ in layout"
        if any(layout_of(t) != PLAIN for t in problem.inputs[1:]):
            return "parameters are plain"
        return None

    def default(self, problem: Problem, target: Target) -> Config:
        return {"elements": 16384}

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"elements": [4096, 16384, 65536]})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x = tensor(problem.inputs[0])
        batch, channels, pixels = x.dims[0], x.dims[1], math.prod(x.dims[2:])
        source = Source("norm_batch", self.specialise)
        for i, name in enumerate(("x", "scale", "bias", "mean", "variance")):
            source.buffer(name, tensor(problem.inputs[i]).dtype, In(i))
        source.buffer("y", tensor(problem.outputs[0]).dtype, Out())
        real = source.compute("x")
        epsilon = float(problem.attrs.get("epsilon", 1e-5))
        if real == "f64":
            source.fixed(EPSILON=repr(epsilon))
        else:
            source.numbers(EPSILON=epsilon)
        source.fixed(REAL=real, SQRT=f"{real}_sqrt")
        if problem.attrs.get("training_mode", 0):
            return [_training(source, problem, batch, channels, pixels)]
        wanted = int(config["elements"])
        if x.layout != PLAIN:
            block = x.layout.block
            source.fixed(LANES=block, WIDTH="LANES")
            per_item = greater(1, wanted // block)
            return [_lanes(source, batch, -(-channels // block), channels, pixels, block, pixels * block, per_item)]
        if pixels == 1:
            source.fixed(LANES=LANES, WIDTH="n")
            per_item = greater(1, wanted // greater(1, lesser(channels, LANES)))
            return [_lanes(source, 1, -(-channels // LANES), channels, batch, channels, LANES, per_item)]
        return [_rows(source, wanted, batch * channels, channels, pixels)]


def _factor(source: Source, channel: str) -> str:
    """Statements that compute the factor and the shift of a channel."""
    scale, bias, mean, variance = (source.load(n, channel) for n in ("scale", "bias", "mean", "variance"))
    return f"REAL factor = {scale} / SQRT({variance} + EPSILON), shift = {bias} - {mean} * factor;"


def _rows(source: Source, elements: int, rows: int, channels: int, pixels: int) -> EmittedLaunch:
    """The launch for rows of pixels that have one channel each."""
    per_item = greater(1, elements // greater(pixels, 1), -(-rows // MOST_ITEMS))
    source.dims(ROWS=rows, CHANNELS=channels, PIXELS=pixels, PER_ITEM=per_item)
    source.add(f"""int first = GID(0) * PER_ITEM, last = ROWS - first < PER_ITEM ? ROWS : first + PER_ITEM;
for (int row = first; row < last; row++) {{
  int c = row % CHANNELS, at = row * PIXELS;
  {_factor(source, "c")}
  for (int j = 0; j < PIXELS; j++) {source.store("y", "at + j", f"{source.load('x', 'at + j')} * factor + shift")}
}}""")
    return source.call([-(-rows // per_item)])


def _lanes(
    source: Source, outer: int, tiles: int, channels: int, positions: int, step: int, tile_step: int, per_item: int
) -> EmittedLaunch:
    """The launch for neighbours of different channels: factors of a tile of channels first, then each position."""
    per_item = greater(per_item, -(-positions // MOST_ITEMS))
    source.dims(CHANNELS=channels, TILES=tiles, POSITIONS=positions, STEP=step, TILE_STEP=tile_step)
    source.dims(PER_ITEM=per_item, OUTER_STEP=tiles * tile_step)
    source.add(f"""int tile = GID(0) % TILES, base = GID(0) / TILES * OUTER_STEP + tile * TILE_STEP;
int n = CHANNELS - tile * LANES < LANES ? CHANNELS - tile * LANES : LANES;
REAL factors[LANES], shifts[LANES];
for (int j = 0; j < LANES; j++) factors[j] = shifts[j] = 0;
for (int j = 0; j < n; j++) {{
  int c = tile * LANES + j;
  {_factor(source, "c")}
  factors[j] = factor; shifts[j] = shift;
}}
int first = GID(1) * PER_ITEM, last = POSITIONS - first < PER_ITEM ? POSITIONS : first + PER_ITEM;
for (int p = first; p < last; p++) {{
  int at = base + p * STEP;
  for (int j = 0; j < WIDTH; j++) {{
    {source.store("y", "at + j", f"{source.load('x', 'at + j')} * factors[j] + shifts[j]")}
  }}
}}""")
    return source.call([outer * tiles, -(-positions // per_item)])


def _training(source: Source, problem: Problem, batch: int, channels: int, pixels: int) -> EmittedLaunch:
    """The launch that uses the statistics of the batch; a work-item has one channel.

    It moves the running statistics towards those of the batch.
    """
    momentum = float(problem.attrs.get("momentum", 0.9))
    source.fixed(MOMENTUM=f"(REAL){momentum!r}", BLOCK=BLOCK)
    source.dims(BATCH=batch, CHANNELS=channels, PIXELS=pixels)
    running = []
    for i, (old, new) in enumerate((("mean", "now"), ("variance", "spread")), start=1):
        if i < len(problem.outputs):
            source.buffer(f"{old}_out", tensor(problem.outputs[i]).dtype, Out(i))
            value = f"{source.load(old, 'c')} * MOMENTUM + {new} * (1 - MOMENTUM)"
            running.append(source.store(f"{old}_out", "c", value))

    def total(name: str, term: str) -> str:
        return f"""REAL {name} = 0;
for (int n = 0; n < BATCH; n++) for (int begin = 0; begin < PIXELS; begin += BLOCK) {{
  REASSOCIATE
  int at = (n * CHANNELS + c) * PIXELS, end = PIXELS - begin < BLOCK ? PIXELS : begin + BLOCK;
  REAL part = 0;
  for (int j = begin; j < end; j++) {{ REAL v = {source.load("x", "at + j")}; part += {term}; }}
  {name} += part;
}}"""

    source.add(f"""int c = GID(0);
{total("sum", "v")}
REAL now = sum / (BATCH * PIXELS);
{total("squares", "(v - now) * (v - now)")}
REAL spread = squares / (BATCH * PIXELS);
{" ".join(running)}
REAL factor = {source.load("scale", "c")} / SQRT(spread + EPSILON), shift = {source.load("bias", "c")} - now * factor;
for (int n = 0; n < BATCH; n++) {{
  int at = (n * CHANNELS + c) * PIXELS;
  for (int j = 0; j < PIXELS; j++) {source.store("y", "at + j", f"{source.load('x', 'at + j')} * factor + shift")}
}}""")
    return source.call([channels])


SOLVERS = both(BatchNorm)
