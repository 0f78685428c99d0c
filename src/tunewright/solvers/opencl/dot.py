"""Sums of four products of bytes: one instruction where the processor has it and the compiler lets us write it.

`dot4(acc, x, w)` adds, in each 32-bit lane, the products of four unsigned bytes of x with four signed ones of w. All
three ways to compute it are exact:

- ``vpdpbusd`` (AVX-512 VNNI). A compiler that is too old for the processor (LLVM 14 takes a Zen 4 for a Zen 3) does not
  know the instruction and would not assemble its name. Then its bytes are written down: the assembler finds out by
  itself which registers the compiler has chosen.
- pairs of 16-bit numbers (``vpmaddwd``): exact, unlike ``vpmaddubsw``, whose sums of two products saturate.
- shifts and multiplications, for any other processor.

Flags of the processor are not enough to take the first way: `has_vnni` compiles a kernel with it, runs it and looks at
the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ...devices.base import Target
from ...devices.host import cpu_flags
from ...devices.c_device import CDevice
from ...errors import TunewrightError
from ...ir.types import DType
from .emit import Out, Source, Table

#: what the processor says of itself when it has the instruction on vectors of any width
FLAGS = frozenset({"avx512_vnni", "avx512vl"})

#: V: a vector of WIDTH 32-bit numbers; VNNI: 1 where the instruction may be used
DOT4 = r"""
vector_of(i32, WIDTH, V);
typedef V VU __attribute__((aligned(1)));
#ifndef __has_builtin
#define __has_builtin(name) 0
#endif
#ifdef VNNI
INLINE V dot4(V acc, V x, V w) {
  __asm__(VNNI " %2, %1, %0" : "+v"(acc) : "v"(x), "v"(w)); /* the builtin's types change from clang to clang */
  return acc;
}
#elif WIDTH == 8 && defined(__AVX2__) && __has_builtin(__builtin_ia32_pmaddwd256)
#define MADD __builtin_ia32_pmaddwd256
#elif WIDTH == 16 && defined(__AVX512BW__) && __has_builtin(__builtin_ia32_pmaddwd512)
#define MADD __builtin_ia32_pmaddwd512
#else
INLINE V dot4(V acc, V x, V w) {
  return acc + (x & 255) * (w << 24 >> 24) + (x >> 8 & 255) * (w << 16 >> 24) + (x >> 16 & 255) * (w << 8 >> 24)
       + (x >> 24 & 255) * (w >> 24);
}
#endif
#ifdef MADD
typedef i16 PX __attribute__((vector_size(4 * WIDTH)));
vector_of(i16, 2 * WIDTH, P);
INLINE V dot4(V acc, V x, V w) {
  V low = x & 0x00ff00ff, high = x >> 8 & 0x00ff00ff;
  P odd = CAST_BITS(w, P) >> (i16)8, even = CAST_BITS(w, P) << (i16)8 >> (i16)8;
  acc += CAST_BITS(MADD(CAST_BITS(low, PX), CAST_BITS(even, PX)), V);
  return acc + CAST_BITS(MADD(CAST_BITS(high, PX), CAST_BITS(odd, PX)), V);
}
#endif
"""


#: PREFETCH(p) brings what lies at p into the second cache; FETCH 0: it does nothing
PREFETCH = """
#if FETCH && defined(__has_builtin)
#if __has_builtin(__builtin_prefetch)
#define PREFETCH(p) __builtin_prefetch((const void*)(size_t)(p), 0, 2)
#endif
#endif
#ifndef PREFETCH
#define PREFETCH(p)
#endif
"""

#: what tuning may choose: blocks of columns (output channels) and rows (pixels) of a register tile
BLOCKS, ROWS = (1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
#: tiles for at least so many registers, with the time of a product in them relative to the best
TILES = {
    32: {(4, 6): 1.0, (3, 8): 1.05, (2, 10): 1.1, (1, 12): 1.4},
    0: {(2, 6): 1.0, (2, 5): 1.02, (2, 4): 1.05, (3, 4): 1.2, (1, 10): 1.5},
}


@dataclass(frozen=True)
class Tiling:
    """So many blocks of columns and rows, in register tiles."""

    blocks: int
    rows: int
    registers: int

    @property
    def _most(self) -> int:
        """The smallest tile that holds all rows."""
        return next((n for n in ROWS if n >= self.rows), ROWS[-1])

    def fits(self, nb: int, ur: int) -> bool:
        """A tile is worth trying: it stays in registers, and is not larger than what there is, or very small."""
        if nb * ur + min(nb, ur) + 1 > self.registers or nb > self.blocks:
            return False
        return ur == self._most or (ur < self._most and nb * ur >= self.registers // 2)

    def best(self) -> tuple[int, int]:
        """The tile that does least in vain."""
        known = next(tiles for registers, tiles in TILES.items() if self.registers >= registers)
        few = {(nb, self._most): 2 - nb / 8 for nb in BLOCKS if self.fits(nb, self._most)}
        fitting = few | {tile: cost for tile, cost in known.items() if self.fits(*tile)}

        def done(tile: tuple[int, int]) -> float:
            nb, ur = tile
            return -(-self.blocks // nb) * nb * -(-self.rows // ur) * ur * fitting[tile]

        return min(fitting, key=done)


def add(source: Source, target: Target) -> None:
    """Makes `dot4`, the type V of a vector and VU, the same unaligned, known to a kernel."""
    source.fixed(WIDTH=target.vector_bytes // 4)
    if has_vnni(target):  # without AVX-512 it has an encoding of its own
        source.fixed(VNNI='"vpdpbusd"' if target.vector_bytes == 64 else '"%{vex%} vpdpbusd"')
    source.function(DOT4)


def has_vnni(target: Target) -> bool:
    """The processor has the instruction on vectors of the target's width."""
    if target.vector_bytes == 64:
        return target.has("avx512vnni")
    return target.vector_bytes in (16, 32) and target.has("avxvnni")
