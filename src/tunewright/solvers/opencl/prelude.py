"""What every kernel's source begins with: the words of the dialect, element types, conversions, and mathematics.

The mathematics is plain arithmetic, so that a loop over elements is vectorised. PoCL's own library functions (exp, fmin,
rint, ...) are calls, which keeps the loop scalar (15 times slower); on 512-bit vectors some of them even crash. The
compiler's ``__builtin_sqrtf``, ``__builtin_floorf`` and their like become instructions and are fine.
"""

from __future__ import annotations

#: all that another dialect of C would have to replace
OPENCL = """
#define KERNEL __kernel __attribute__((reqd_work_group_size(1, 1, 1))) void
#define GLOBAL __global
#define GID(n) ((int)get_global_id(n))
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("unroll")
/* sums may be taken in any order, so that they are vectorised: stands first in a block */
#define REASSOCIATE _Pragma("clang fp reassociate(on)")
typedef char i8; typedef uchar u8; typedef short i16; typedef ushort u16; typedef int i32; typedef uint u32;
typedef long i64; typedef ulong u64; typedef float f32; typedef double f64;
INLINE f32 as_f32(u32 x) { return as_float(x); }
INLINE u32 as_u32(f32 x) { return as_uint(x); }
#define vector_of(T, n, V) typedef T V __attribute__((ext_vector_type(n)))
#define LOADV(p) (*(GLOBAL const VU*)(p))
#define STOREV(p, v) (*(GLOBAL VU*)(p) = (v))
"""

CONVERSIONS = """
INLINE f32 f16_load(u16 h) {
  u32 e = (h >> 10) & 31, m = h & 1023, s = (u32)(h & 0x8000) << 16;
  u32 n = ((e + 112) << 23) | (m << 13);
  n = e == 31 ? 0x7f800000u | (m << 13) : n;
  n = e == 0 ? as_u32((f32)(i32)m * 5.9604644775390625e-8f) : n;
  return as_f32(n | s);
}
INLINE u16 f16_store(f32 f) {
  u32 u = as_u32(f), s = (u >> 16) & 0x8000; u &= 0x7fffffff;
  u32 r = u + 0xfff + ((u >> 13) & 1), n = (r - 0x38000000u) >> 13;
  f32 t = as_f32(u < 0x38800000u ? u : 0);
  n = u < 0x38800000u ? (u32)(i32)__builtin_rintf(t * 16777216.0f) : n;
  n = r >= 0x47800000u ? 0x7c00 : n;
  n = u > 0x7f800000u ? 0x7e00 : n;
  return (u16)(n | s);
}
INLINE f32 bf16_load(u16 h) { return as_f32((u32)h << 16); }
INLINE u16 bf16_store(f32 f) {
  u32 u = as_u32(f), n = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (u16)((u & 0x7fffffff) > 0x7f800000u ? 0x7fc0 : n);
}
"""

MATHEMATICS = """
INLINE f32 f32_max(f32 a, f32 b) { return a > b ? a : b; }
INLINE f32 f32_min(f32 a, f32 b) { return a < b ? a : b; }
INLINE f32 f32_exp(f32 x) {
  f32 c = x > 88.72283f ? 88.72283f : x; c = c < -87.33654f ? -87.33654f : c;
  f32 n = __builtin_rintf(c * 1.44269504089f), r = c - n * 0.693359375f + n * 2.12194440e-4f;
  f32 p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f; p = p * (r * r) + r + 1.0f;
  i32 k = (i32)n, h = k >> 1;  /* in two steps: 2^128 has no float */
  f32 v = p * as_f32((u32)(h + 127) << 23) * as_f32((u32)(k - h + 127) << 23);
  v = x > 88.72283f ? as_f32(0x7f800000u) : v;
  v = x < -87.33654f ? 0.0f : v;
  return x != x ? x : v;
}
INLINE f32 f32_sigmoid(f32 x) { return 1.0f / (1.0f + f32_exp(-x)); }
INLINE f32 f32_tanh(f32 x) {
  f32 a = __builtin_fabsf(x), s = x * x, e = f32_exp(-2.0f * a);
  f32 far = (1.0f - e) / (1.0f + e);
  f32 p = -5.70498872745e-3f;
  p = p * s + 2.06390887954e-2f; p = p * s - 5.37397155531e-2f; p = p * s + 1.33314422036e-1f;
  p = p * s - 3.33332819422e-1f;
  f32 near = p * s * x + x;
  return a < 0.625f ? near : x < 0.0f ? -far : x != x ? x : far;
}
"""

PRELUDE = OPENCL + CONVERSIONS + MATHEMATICS
