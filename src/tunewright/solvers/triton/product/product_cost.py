"""Estimated times of product configs. The default has the least estimate; spaces omit configs that are much slower.

The slowest of three things bounds a program's steps: the multiplications, the bytes that a multiprocessor gets from the
L2 cache, or the latency of the loads where few bytes are in flight. Because of the latency, deep sums over few tiles
want many stages and several programs per multiprocessor. Programs that share a sum pay extra for their parts, which one
of them fetches. The constants roughly describe an H200; only their ratios matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from tunewright.devices.base import Target
from tunewright.ir.types import DType
from tunewright.search.space import Scalar

from . import precision
from .product_shape import ProductShape, fold, steps, steps_each

#: latency of a load; fixed cost of a step
LATENCY, STEP = 0.7e-6, 0.04e-6
#: bytes per second from the L2 cache to one multiprocessor, and from memory to all of them
LINK, MEMORY = 55e9, 4.0e12
#: Multiply-adds per second of a multiprocessor: in large tiles; in tiles below 64 rows, which use other instructions;
#: and in single precision without tensor cores.
TENSOR, SMALL, SINGLE = 4.5e12, 1.6e12, 0.25e12
#: time around the steps, once; extra time per program of a multiprocessor; extra time of a shared sum
AROUND, PROGRAM, SHARED = 0.7e-6, 0.1e-6, 1.0e-6
#: registers of a multiprocessor
REGISTERS = 65536
#: Shared memory of a program in bytes, slightly below the hardware limit: ROOM by compute capability, USUAL_ROOM for
#: others from 80 on, OLD_ROOM for older ones.
ROOM, USUAL_ROOM = {80: 160 << 10, 87: 160 << 10, 90: 200 << 10, 100: 200 << 10, 103: 200 << 10}, 94 << 10
OLD_ROOM = 60 << 10
#: first compute capability with a memory engine (TMA)
ENGINE = 90
#: Sums of a thread. With fewer, it has too little work. A thread has 255 registers in total; with more sums the kernel
#: takes a minute to compile and runs slowly.
LEAST_SUMS, MOST_SUMS = 2, 128
#: multiplications unrolled per thread where tensor cores are not used
MOST_UNROLLED = 2048
#: the smallest number of rows, columns and channels for tensor cores
LEAST = 16
#: numbers of programs that may share a sum
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
#: number of configs that a search tries first
PROMISING = 12
#: With more tiles per multiprocessor than this, a program may compute several tiles in turn.
MANY = 2
#: Columns of a tile. A tile of 192 is multiplied as 128 and 64, and only used where 192 divides the columns. It makes
#: four tiles of 768 columns, so that 4,096 rows give 128 tiles and not 96.
WIDTHS, UNEVEN = (16, 32, 64, 128, 192, 256), 192
#: A sum of at least this many terms counts as deep.
DEEP = 768


@dataclass(frozen=True)
class Gpu:
    """The limits of a target that matter for products."""

    units: int
    room: int
    engine: bool

    @staticmethod
    def of(target: Target) -> Gpu:
        digits = target.arch.removeprefix("sm_")
        arch = int(digits) if digits.isdigit() else ENGINE  # the interpreter supports everything
        return Gpu(max(target.units, 1), ROOM.get(arch, USUAL_ROOM if arch >= 80 else OLD_ROOM), arch >= ENGINE)


def estimate(shape: ProductShape, config: Mapping[str, Any], gpu: Gpu, dtype: DType) -> float:
    """Estimate the seconds that a config takes."""
    bm, bn, bk, split, warps, stages = (int(config[k]) for k in ("bm", "bn", "bk", "split", "warps", "stages"))
    number, size = steps_each(shape, config), dtype.itemsize
    large = bm >= 64 and warps >= 4
    rate = TENSOR * min(1.0, bm * bn / 16384) ** 0.25 if large else SMALL
    if dtype is DType.FLOAT32 and config.get("precision", "ieee") == "ieee":
        rate = SINGLE
    sent = (bm + bn) * bk * size
    sums = bm * bn // (32 * warps)
    fits = min(gpu.room // (stages * sent), REGISTERS // (32 * warps * min(255, sums + 72)), 48 // warps)
    programs = shape.tiles(bm, bn) * split
    ahead = stages - (1.5 if large else 1.0)  # one of the loaded steps is being multiplied, or even two

    def wave(together: int) -> float:
        """The time of a wave: ``together`` programs on each multiprocessor at the same time."""
        work = max(2 * bm * bn * bk * together / rate, sent * together / LINK)
        step = max(work, LATENCY / ahead) if ahead > 0 else work + LATENCY / together
        return LATENCY + AROUND + number * (step + STEP) + together * (PROGRAM + bm * bn * size / LINK)

    together = max(1, min(fits, -(-programs // gpu.units)))
    waves, rest = divmod(programs, gpu.units * together)
    taken = waves * wave(together) + (wave(-(-rest // gpu.units)) if rest else 0.0)
    if split > 1:
        taken += SHARED + bm * bn * 4 * (split + 1) / LINK
    moved = shape.rows * shape.depth + shape.depth * shape.columns * shape.kernel[0] * shape.kernel[1]
    return max(taken, size * shape.products * (moved + shape.rows * shape.columns) / MEMORY)


def possible(shape: ProductShape, config: Mapping[str, Any], gpu: Gpu, dtype: DType) -> bool:
    """Whether a config compiles in reasonable time and no equivalent config is better."""
    bm, bn, bk, split, warps = (int(config[k]) for k in ("bm", "bn", "bk", "split", "warps"))
    if not max(256, warps * 32 * LEAST_SUMS) <= bm * bn <= min(128 * 256, warps * 32 * MOST_SUMS):
        return False
    form = config.get("form", "tiles")
    if bn == UNEVEN and (shape.columns % bn or split > 1 or bm < 64 or form != "tiles" or dtype is DType.FLOAT32):
        return False
    written = bm * bn if form != "tiles" else 0  # the finished tile is still being written while the next one is loaded
    if ((bm + bn) * bk * int(config["stages"]) + written) * dtype.itemsize > gpu.room:
        return False
    if not precision.is_safe(config, bm, warps):
        return False
    if config.get("precision") == "ieee" and bm * bn * bk > warps * 32 * MOST_UNROLLED:
        return False
    folded = fold(shape, config)
    deep = shape.depth if folded is None else shape.kernel[0] * folded.pitch if folded.flat else folded.end
    sizes = (bm, shape.rows), (bn, shape.columns), (bk, deep)
    if any(block >= 2 * max(size, LEAST) for block, size in sizes):
        return False
    tiles, number = shape.tiles(bm, bn), steps(shape, config)
    if int(config["stages"]) > 2 and int(config["stages"]) > -(-number // split) + 1:
        return False  # too few steps to load so far ahead
    if split > 1 and (split > number or tiles * split > 6 * gpu.units):
        return False
    across = shape.columns > bn and shape.rows > bm
    if int(config["group"]) > 1 and not (across and tiles > gpu.units):
        return False  # all tiles run at the same time anyway
    if form == "tiles":
        return True
    if form == "specialised" and (warps != 4 or bm < 128 or not shape.dense):
        return False  # two groups of four warps multiply 64 rows each
    return split == 1 and tiles > MANY * gpu.units and described(shape, config, dtype)


def described(shape: ProductShape, config: Mapping[str, Any], dtype: DType) -> bool:
    """Whether TMA can copy the tiles: rows of matrices are multiples of 16 bytes, and steps end with a tap."""
    if shape.products > 1 or "fold" in config or dtype is DType.FLOAT32:
        return False
    lines = [shape.columns, *([shape.depth] if shape.dense else [])]
    return all(line * dtype.itemsize % 16 == 0 for line in lines) and (shape.dense or shape.depth % config["bk"] == 0)


@lru_cache(4096)
def best(shape: ProductShape, gpu: Gpu, dtype: DType) -> tuple[tuple[tuple[str, Any], ...], float]:
    """The items of the config with the least estimate, and that estimate. Usual configs come first, if any."""
    usual = None if dtype is DType.FLOAT32 else _best(shape, gpu, dtype, usual=True)
    found = usual or _best(shape, gpu, dtype, usual=False)
    assert found is not None
    return found


def promising(shape: ProductShape, gpu: Gpu, dtype: DType) -> list[tuple[tuple[str, Any], ...]]:
    """The items of the best config for each tile and number of warps, least estimates first."""
    tiles: dict[tuple[int, int, int], tuple[float, dict[str, Any]]] = {}
    for seconds, config in _candidates(shape, gpu, dtype, usual=False):
        tile = config["bm"], config["bn"], config["warps"]
        if tile not in tiles or seconds < tiles[tile][0]:
            tiles[tile] = seconds, config
    ranked = sorted(tiles.values(), key=lambda pair: pair[0])
    return [tuple(config.items()) for _, config in ranked[:PROMISING]]


def _best(shape: ProductShape, gpu: Gpu, dtype: DType, usual: bool) -> tuple[tuple[tuple[str, Any], ...], float] | None:
    found = min(_candidates(shape, gpu, dtype, usual), key=lambda pair: pair[0], default=None)
    return None if found is None else (tuple(found[1].items()), found[0])


def _candidates(shape: ProductShape, gpu: Gpu, dtype: DType, usual: bool) -> Iterator[tuple[float, dict[str, Any]]]:
    """Candidates for the default, each with its estimate. Without ``usual``, also candidates with more warps for a
    search."""
    single = dtype is DType.FLOAT32
    extra: dict[str, Scalar] = {name: values[0] for name, values in _optional(shape, gpu, dtype).items()}
    bks = (16, 32) if single else (16, 32, 64) if "fold" in extra else _deep(shape)
    for bm, bn, bk in product((16, 32, 64, 128), WIDTHS, bks):
        if bm * bn < 256 or (usual and not _is_usual(shape, bm, bn, bk, gpu)):
            continue
        tiles = shape.tiles(bm, bn)
        others = (4, 8) if not usual and 64 * 128 <= bm * bn <= 128 * 128 else (_warps(shape, bm, bn, gpu),)
        for split, stages, warps in product((1, 2, 3, 4, 6, 8), (2, 3, 4, 5), others):
            group = 8 if tiles > gpu.units and shape.columns > bn and shape.rows > bm else 1
            config = extra | {
                "bm": bm, "bn": bn, "bk": bk, "split": split, "warps": warps, "stages": stages, "group": group,
            }  # fmt: skip
            if split > 1 and (tiles * split > 2 * gpu.units or bm * bn >= 128 * 128):
                continue
            if bm >= 64 and stages < 3 and steps_each(shape, config) > 2:
                continue  # one step is being multiplied and one is next, so no load would be in flight
            if usual and stages > 3 and bm * bn == 64 * 128 and tiles > 2 * gpu.units:
                continue  # a third program on each multiprocessor gains more
            if possible(shape, config, gpu, dtype):
                yield estimate(shape, config, gpu, dtype), config


def _is_usual(shape: ProductShape, bm: int, bn: int, bk: int, gpu: Gpu) -> bool:
    """Whether measurements on an H200 favour the tile, where the estimate does not show it.

    The measurements cover the layers of ResNet-50 at batch 1 and 64 and the products of BERT-base.
    """
    if bm * bn >= 128 * 128 and bk > 64:  # more stages are better than longer ones
        return False
    if shape.folds:  # few steps: other programs hide the time before and after them
        return bm <= 64 or bn < 64
    if bk < 64 <= shape.depth:
        return False
    if _is_deep(shape) and shape.columns % UNEVEN == 0 and gpu.units < shape.tiles(64, UNEVEN) <= 2 * gpu.units:
        return bm == 64 and bn == UNEVEN  # all tiles run at the same time, with two programs per multiprocessor
    if bn > 128:
        return False
    wide = bn >= min(128, shape.columns)
    if shape.tiles(128, 128) >= MANY * gpu.units:
        return bm == 128 and wide and bk <= 64
    return bm * bn < 128 * 128 and (shape.tiles(64, 128) < gpu.units or (bm >= 64 and wide))


def _is_deep(shape: ProductShape) -> bool:
    return shape.kernel[0] * shape.kernel[1] * shape.depth >= DEEP


def _warps(shape: ProductShape, bm: int, bn: int, gpu: Gpu) -> int:
    """The default number of warps. With four, a tile of 128 x 128 leaves room for other programs, which hide its end.
    This matters most unless sums are deep."""
    if bm * bn == 128 * 128:
        return 8 if _is_deep(shape) and shape.dense else 4
    many = shape.tiles(128, 128) >= MANY * gpu.units
    return 8 if bm * bn > 128 * 128 or (many and (bm, bn) == (128, 64)) else 4


def _deep(shape: ProductShape) -> tuple[int, ...]:
    """The possible numbers of channels per step."""
    return (32, 64, 128) if shape.depth >= 64 else (16, 32, 64)


def params(shape: ProductShape, gpu: Gpu, dtype: DType) -> dict[str, Sequence[Scalar]]:
    """All parameters, with the values that some config of the shape may have."""
    high = [b for b in WIDTHS if b < 2 * max(shape.rows, LEAST) and b != UNEVEN]
    wide = [b for b in WIDTHS if b < 2 * max(shape.columns, LEAST) and (b != UNEVEN or shape.columns % b == 0)]
    parts = 6 * gpu.units // shape.tiles(high[-1], wide[-1])
    several = shape.tiles(high[0], wide[0]) > gpu.units and shape.rows > LEAST and shape.columns > LEAST
    found: dict[str, Sequence[Scalar]] = {
        "bm": high, "bn": wide, "bk": [16, 32, 64] if dtype is DType.FLOAT32 or shape.folds else _deep(shape),
        "split": [s for s in SPLITS if s <= max(1, parts)], "warps": [1, 2, 4, 8], "stages": [1, 2, 3, 4, 5],
        "group": [1, 8] if several else [1],
    }  # fmt: skip
    return found | _optional(shape, gpu, dtype)


def _optional(shape: ProductShape, gpu: Gpu, dtype: DType) -> dict[str, Sequence[Scalar]]:
    """Parameters that only some shapes have, the default value first."""
    found: dict[str, Sequence[Scalar]] = {}
    if shape.folds:
        found |= {"fold": ["flat", "row"], "align": shape.alignments(dtype)}
    if shape.tiles(128, 128) > MANY * gpu.units and dtype is not DType.FLOAT32 and gpu.engine:
        found["form"] = ["tiles", "descriptors", "specialised"]
    return found | precision.params(dtype)
