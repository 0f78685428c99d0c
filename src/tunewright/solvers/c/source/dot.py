"""Sums of products of integers in the lanes of vectors, with the best instructions of a processor.

`dot4(acc, x, w)` adds, in each 32-bit lane, the products of four unsigned bytes of x with four signed ones of w.
`dot2(a, b)` is the sum of the products of two 16-bit numbers. All implementations are exact:

- ``vpdpbusd`` (AVX512-VNNI on 512 bits, AVX-VNNI on 256) is `dot4`.
- ``sdot`` (aarch64) multiplies signed bytes with signed ones. Therefore x is used with its highest bits flipped, which
  subtracts 128 from each byte, and a second sum adds 128 times each weight. The compiler computes that sum once for all
  rows.
- ``pmaddwd`` is `dot2`, and two of them are `dot4`. It is exact, unlike ``pmaddubsw``, whose sums of two products
  saturate.
- shifts and multiplications, for any other processor.

Instructions that not every processor of a level has are written in assembly, where the target has them: the types of
the builtins differ between versions of clang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tunewright.devices.base import Target
from tunewright.ir.symbolic import hint, lesser

from .emit import Source

#: by bytes of a vector: the processor feature that provides `dot4`, and the macros that select it
INSTRUCTIONS: Mapping[int, tuple[str, Mapping[str, int | str]]] = {
    64: ("avx512vnni", {"VNNI": '"vpdpbusd"'}),
    32: ("avxvnni", {"VNNI": '"%{vex%} vpdpbusd"'}),  # Without AVX-512 the instruction has a different encoding.
    16: ("dotprod", {"SDOT": 1}),
}

#: PX: the type of the operands of the builtin MADD, if that builtin exists
MADD = """
#ifndef __has_builtin
#define __has_builtin(name) 0
#endif
#if WIDTH == 4 && defined(__SSE2__) && __has_builtin(__builtin_ia32_pmaddwd128)
#define MADD __builtin_ia32_pmaddwd128
#elif WIDTH == 8 && defined(__AVX2__) && __has_builtin(__builtin_ia32_pmaddwd256)
#define MADD __builtin_ia32_pmaddwd256
#elif WIDTH == 16 && defined(__AVX512BW__) && __has_builtin(__builtin_ia32_pmaddwd512)
#define MADD __builtin_ia32_pmaddwd512
#endif
"""

#: V: a vector of WIDTH sums; P: a vector of pairs
DOT2 = """
vector_of(i32, WIDTH, V); vector_of(i16, 2 * WIDTH, P);
#ifdef MADD
typedef i16 PX __attribute__((vector_size(4 * WIDTH)));
INLINE V dot2(P a, P b) { return CAST_BITS(MADD(CAST_BITS(a, PX), CAST_BITS(b, PX)), V); }
#else
INLINE V dot2(P a, P b) {
  return __builtin_convertvector(a.even, V) * __builtin_convertvector(b.even, V)
       + __builtin_convertvector(a.odd, V) * __builtin_convertvector(b.odd, V);
}
#endif
"""

#: Needs DOT2 in front. VNNI, SDOT: the instruction is available.
DOT4 = r"""
typedef V VU __attribute__((aligned(1)));
#if defined(VNNI)
INLINE V dot4(V acc, V x, V w) {
  __asm__(VNNI " %2, %1, %0" : "+v"(acc) : "v"(x), "v"(w));
  return acc;
}
#elif defined(SDOT)
INLINE V sdot(V acc, V x, V w) {
  __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(acc) : "w"(x), "w"(w));
  return acc;
}
INLINE V dot4(V acc, V x, V w) {
  V highest = (V)(i32)0x80808080u;  /* as signed bytes: -128 each */
  return sdot(acc, x ^ highest, w) - sdot((V)(0), highest, w);
}
#elif defined(MADD)
INLINE V dot4(V acc, V x, V w) {
  V low = x & 0x00ff00ff, high = x >> 8 & 0x00ff00ff;
  P odd = CAST_BITS(w, P) >> (i16)8, even = CAST_BITS(w, P) << (i16)8 >> (i16)8;
  return acc + dot2(CAST_BITS(low, P), even) + dot2(CAST_BITS(high, P), odd);
}
#else
INLINE V dot4(V acc, V x, V w) {
  return acc + (x & 255) * (w << 24 >> 24) + (x >> 8 & 255) * (w << 16 >> 24) + (x >> 16 & 255) * (w << 8 >> 24)
       + (x >> 24 & 255) * (w >> 24);
}
#endif
"""


#: PREFETCH(p) brings the memory at p into the second-level cache; with FETCH 0 it does nothing.
PREFETCH = """
#if FETCH && defined(__has_builtin)
#if __has_builtin(__builtin_prefetch)
#define PREFETCH(p) __builtin_prefetch((const void*)(size_t)(p), 0, 2)
#endif
#endif
#ifndef PREFETCH
#define PREFETCH(p) ((void)(p))
#endif
"""

#: the choices of tuning: blocks of columns (output channels) and rows (pixels) of a register tile
BLOCKS, ROWS = (1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
#: Tiles by the least number of registers, with the time of a product in each tile relative to the best one.
TILES = {
    32: {(4, 6): 1.0, (3, 8): 1.05, (2, 10): 1.1, (1, 12): 1.4},
    0: {(2, 6): 1.0, (2, 5): 1.02, (2, 4): 1.05, (3, 4): 1.2, (1, 10): 1.5},
}


@dataclass(frozen=True)
class Tiling:
    """The blocks of columns and the rows of a product, from which a register tile is chosen."""

    blocks: int
    rows: int
    registers: int

    @property
    def _most(self) -> int:
        """The smallest tile that holds all rows."""
        return next((n for n in ROWS if n >= hint(self.rows)), ROWS[-1])

    def fits(self, nb: int, ur: int) -> bool:
        """Whether a tile is worth trying: it fits the registers, is not larger than the work, and is not very small."""
        if nb * ur + lesser(nb, ur) + 1 > self.registers or nb > self.blocks:
            return False
        return ur == self._most or (ur < self._most and nb * ur >= self.registers // 2)

    def best(self) -> tuple[int, int]:
        """The tile that wastes the least work."""
        known = next(tiles for registers, tiles in TILES.items() if self.registers >= registers)
        few = {(nb, self._most): 2 - nb / 8 for nb in BLOCKS if self.fits(nb, self._most)}
        fitting = few | {tile: cost for tile, cost in known.items() if self.fits(*tile)}

        def done(tile: tuple[int, int]) -> float:
            nb, ur = tile
            rows: int = hint(self.rows)
            return -(-self.blocks // nb) * nb * -(-rows // ur) * ur * fitting[tile]

        return min(fitting, key=done)


def add_pairs(source: Source, target: Target) -> None:
    """Declares `dot2`, V and P in a kernel."""
    source.fixed(WIDTH=target.vector_bytes // 4)
    source.function(MADD + DOT2)


def add(source: Source, target: Target) -> None:
    """Declares `dot4`, V and P in a kernel, and VU, an unaligned V."""
    add_pairs(source, target)
    if has_dot4(target):
        source.fixed(**INSTRUCTIONS[target.vector_bytes][1])
    source.function(DOT4)


def has_dot4(target: Target) -> bool:
    """Whether the processor has an instruction for `dot4` on vectors of the target's width."""
    return target.vector_bytes in INSTRUCTIONS and target.has(INSTRUCTIONS[target.vector_bytes][0])
