"""The beginning of every kernel's source: the macros of the dialect, element types, conversions, and mathematics.

The mathematics is plain arithmetic, so that a loop over elements is vectorised. The f32 functions are accurate to five
units in the last place (tanh and erf: to seven on processors without FMA). Library functions (exp, fmin, rint, ...) are
calls, which keep a loop scalar (15 times slower). The compiler's ``__builtin_sqrtf``, ``__builtin_floorf`` and similar
builtins become instructions and do no harm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache

from tunewright.ops.input_errors import ReportedFault

#: The macros of each dialect of C. The rest of the prelude and all kernels use no other words of a dialect.
OPENCL = """
#define GLOBAL __global
#define GID(n) ((int)get_global_id(n))
#define INLINE static inline __attribute__((always_inline, unused))
#define UNROLL _Pragma("unroll")
#define CAST_BITS(x, T) __builtin_astype(x, T)
#define VECTOR(V, ...) ((V)(__VA_ARGS__))
#define UNUSED __attribute__((unused))
/* sums may be taken in any order, so that they are vectorised: stands first in a block */
#if defined(__clang_major__) && __clang_major__ >= 11
#define REASSOCIATE _Pragma("clang fp reassociate(on)")
#else
#define REASSOCIATE
#endif
typedef char i8; typedef uchar u8; typedef short i16; typedef ushort u16; typedef int i32; typedef uint u32;
typedef long i64; typedef ulong u64; typedef float f32;
INLINE f32 as_f32(u32 x) { return as_float(x); }
INLINE u32 as_u32(f32 x) { return as_uint(x); }
#ifndef WITHOUT_FP64
typedef double f64;
INLINE f64 as_f64(u64 x) { return as_double(x); }
INLINE u64 as_u64(f64 x) { return as_ulong(x); }
#endif
#define f64_of(name) name
#define fmod_f32 fmod
#define CLAIM(report, fault) (atomic_cmpxchg((volatile GLOBAL i32*)(report), 0, fault) == 0)
#define f32_fma __builtin_fmaf
"""

C = r"""
#define GLOBAL
#define GID(n) g##n
#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline, unused))
#define UNROLL _Pragma("unroll")
#define CAST_BITS(x, T) __builtin_bit_cast(T, x)
#define VECTOR(V, ...) ((V){__VA_ARGS__})
#define UNUSED __attribute__((unused))
#define REASSOCIATE _Pragma("clang fp reassociate(on)")
typedef signed char i8; typedef unsigned char u8; typedef short i16; typedef unsigned short u16; typedef int i32;
typedef unsigned int u32; typedef long long i64; typedef unsigned long long u64; typedef float f32; typedef double f64;
typedef __SIZE_TYPE__ size_t;
#define bool _Bool
#define true 1
#define false 0
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
INLINE f32 as_f32(u32 x) { return __builtin_bit_cast(f32, x); }
INLINE u32 as_u32(f32 x) { return __builtin_bit_cast(u32, x); }
INLINE f64 as_f64(u64 x) { return __builtin_bit_cast(f64, x); }
INLINE u64 as_u64(f64 x) { return __builtin_bit_cast(u64, x); }
#define CLAIM(report, fault) ({ i64 none = 0; \
  __atomic_compare_exchange_n(report, &none, fault, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED); })
#define f64_of(name) __builtin_##name
#define fmod_f32 __builtin_fmodf
/* a * b + c rounded once: where that is no instruction, for an a of few bits, whose product f64 holds */
#if defined(__FMA__) || defined(__aarch64__)
#define f32_fma __builtin_fmaf
#else
INLINE f32 f32_fma(f32 a, f32 b, f32 c) { return (f32)((f64)a * b + c); }
#endif
/* conversions are instructions; elsewhere the compiler would call a function for each number */
#if defined(__F16C__) || defined(__aarch64__)
#define WITH_F16
typedef _Float16 f16;
#endif
"""

#: `wrong` writes the first fault of a kernel's inputs into its report (`devices.reports`). CLAIM stores the fault if
#: the report is empty, and is true then. `wrong` is never inlined, so that it does not change how loops are compiled.
REPORTS = (
    "\n".join(f"#define WRONG_{fault.name} {fault.value}" for fault in ReportedFault)
    + """
static __attribute__((noinline, cold, unused))
void wrong(GLOBAL i64* report, int fault, i64 value, i64 limit) {
  if (CLAIM(report, fault)) { report[1] = value; report[2] = limit; }
}
/* 0, for what is divided by 0 */
#define BY_ZERO(report) (wrong(report, WRONG_DIVISION, 0, 0), 0)
"""
)

VECTORS = """
#define vector_of(T, n, V) typedef T V __attribute__((ext_vector_type(n)))
#define LOADV(p) (*(GLOBAL const VU*)(p))
#define STOREV(p, v) (*(GLOBAL VU*)(p) = (v))
"""

#: The two forms agree in every bit, even where denormals count as zero: denormal halves are normal numbers in f32. A
#: NaN keeps its sign and the highest bits of its payload, and becomes quiet.
CONVERSIONS = """
#ifdef WITH_F16
INLINE f32 f16_load(u16 h) { return (f32)CAST_BITS(h, f16); }
INLINE u16 f16_store(f32 f) { return CAST_BITS((f16)f, u16); }
#else
INLINE f32 f16_load(u16 h) {
  u32 e = (h >> 10) & 31, m = h & 1023, s = (u32)(h & 0x8000) << 16;
  u32 n = ((e + 112) << 23) | (m << 13);
  n = e == 31 ? (m ? 0x7fc00000u : 0x7f800000u) | (m << 13) : n;
  n = e == 0 ? as_u32((f32)(i32)m * 5.9604644775390625e-8f) : n;
  return as_f32(n | s);
}
INLINE u16 f16_store(f32 f) {
  u32 u = as_u32(f), s = (u >> 16) & 0x8000; u &= 0x7fffffff;
  u32 r = u + 0xfff + ((u >> 13) & 1), n = (r - 0x38000000u) >> 13;
  f32 t = as_f32(u < 0x38800000u ? u : 0);
  n = u < 0x38800000u ? (u32)(i32)__builtin_rintf(t * 16777216.0f) : n;
  n = r >= 0x47800000u ? 0x7c00 : n;
  n = u > 0x7f800000u ? 0x7e00 | (u >> 13 & 0x1ff) : n;
  return (u16)(n | s);
}
#endif
INLINE f32 bf16_load(u16 h) { return as_f32((u32)h << 16); }
INLINE u16 bf16_store(f32 f) {
  u32 u = as_u32(f), n = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return (u16)((u & 0x7fffffff) > 0x7f800000u ? 0x7fc0 : n);
}
"""

ORDER = """
/* as numpy: a NaN on either side is the result */
#define ORDER(T) \\
  INLINE T T##_maximum(T a, T b) { return ((b > a) | (b != b)) ? b : a; } \\
  INLINE T T##_minimum(T a, T b) { return ((b < a) | (b != b)) ? b : a; }
ORDER(f32) ORDER(i8) ORDER(u8) ORDER(i16) ORDER(u16) ORDER(i32) ORDER(u32) ORDER(i64) ORDER(u64)
/* cheaper, where NaNs do not matter */
INLINE f32 f32_max(f32 a, f32 b) { return a > b ? a : b; }
INLINE f32 f32_min(f32 a, f32 b) { return a < b ? a : b; }
"""

EXPONENTIAL = """
#define F32_INFINITY as_f32(0x7f800000u)
#define F32_NAN as_f32(0x7fc00000u)
#define F32_LN2 0.69314718055994530942f
INLINE f32 f32_fabs(f32 x) { return __builtin_fabsf(x); }
INLINE f32 f32_sqrt(f32 x) { return __builtin_sqrtf(x); }
INLINE f32 f32_round(f32 x) { return __builtin_rintf(x); }
INLINE f32 f32_copysign(f32 x, f32 s) { return as_f32((as_u32(x) & 0x7fffffffu) | (as_u32(s) & 0x80000000u)); }
/* exp(r) - 1 - r for |r| <= ln 2 / 2 */
INLINE f32 f32_exp_rest(f32 r) {
  f32 p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f;
  return p * (r * r);
}
/* Adding 1.5 * 2^23 rounds to an integer n, which then stands in the lowest bits: here 2^(n - 1) of it, 0 for -126 */
#define F32_ROUNDER 12582912.0f
INLINE f32 f32_half_power(f32 t) { return as_f32((as_u32(t) << 23) + (126u << 23)); }
/* exp(x) for -87.3 <= x <= 89 */
INLINE f32 f32_exp_near(f32 x) {
  f32 t = x * 1.44269504089f + F32_ROUNDER, n = t - F32_ROUNDER;
  f32 r = x - n * 0.693359375f + n * 2.12194440e-4f, v = f32_exp_rest(r) + r + 1.0f;
  return (v + v) * f32_half_power(t);
}
INLINE f32 f32_exp(f32 x) {
  f32 c = x > 89.0f ? 89.0f : x;
  return f32_exp_near(c < -87.33f ? -87.33f : c);
}
/* exp(x) - 1, for x <= 0 */
INLINE f32 f32_expm1(f32 x) {
  f32 c = x < -30.0f ? -30.0f : x;
  f32 t = c * 1.44269504089f + F32_ROUNDER, n = t - F32_ROUNDER;
  f32 r = c - n * 0.693359375f + n * 2.12194440e-4f, s = 2.0f * f32_half_power(t);
  return s * (f32_exp_rest(r) + r) + (s - 1.0f);
}
/* x = m * 2^e with m from sqrt(1/2) to sqrt(2), for x > 0 */
INLINE i32 f32_exponent(f32 x) { return (i32)(as_u32(x) - 0x3f3504f3u) >> 23; }
INLINE f32 f32_mantissa(f32 x, i32 e) { return as_f32(as_u32(x) - ((u32)e << 23)); }
/* log((1 + f) * 2^k) */
INLINE f32 f32_log_near(f32 f, f32 k) {
  f32 z = f * f, p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f; p = p * f + 1.1676998740e-1f; p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f; p = p * f - 1.6668057665e-1f; p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f; p = p * f + 3.3333331174e-1f;
  f32 y = p * f * z - k * 2.12194440e-4f - 0.5f * z;
  return f + y + k * 0.693359375f;
}
INLINE f32 f32_log(f32 x) {
  i32 e = f32_exponent(x);
  f32 v = f32_log_near(f32_mantissa(x, e) - 1.0f, (f32)e);
  v = x < 1.17549435e-38f ? -F32_INFINITY : v;
  v = x < 0.0f ? F32_NAN : v;
  return ((x == F32_INFINITY) | (x != x)) ? x : v;
}
/* the error that 1 + x makes is in its difference from 1 */
INLINE f32 f32_log1p(f32 x) {
  f32 u = 1.0f + x, d = u - 1.0f, l = f32_log(u);
  return d == 0.0f ? x : d == x ? l : l * (x / d);
}
INLINE f32 f32_sigmoid(f32 x) { return 1.0f / (1.0f + f32_exp(-x)); }
INLINE f32 f32_softplus(f32 x) {
  f32 a = f32_fabs(x), e = f32_exp_near(a > 87.0f ? -87.0f : -a);
  bool far = e > 0.41421356f;
  return (x < 0.0f ? 0.0f : x) + f32_log_near(far ? 0.5f * (e - 1.0f) : e, far ? 1.0f : 0.0f);
}
/* odd over even; exactly 1 from the bound on, whether or not sums of products are rounded once */
INLINE f32 f32_tanh(f32 x) {
  f32 c = x > 8.4375f ? 8.4375f : x; c = c < -8.4375f ? -8.4375f : c;
  f32 s = c * c, p = -2.76076847742355e-16f, q = 1.19825839466702e-06f;
  p = p * s + 2.00018790482477e-13f; p = p * s - 8.60467152213735e-11f; p = p * s + 5.12229709037114e-08f;
  p = p * s + 1.48572235717979e-05f; p = p * s + 6.37261928875436e-04f; p = p * s + 4.89352455891786e-03f;
  q = q * s + 1.18534705686654e-04f; q = q * s + 2.26843463243900e-03f; q = q * s + 4.89352518554385e-03f;
  f32 v = c * p / q;
  v = v > 1.0f ? 1.0f : v;
  return v < -1.0f ? -1.0f : v;
}
/* x tanh(log(1 + exp(x))) */
INLINE f32 f32_mish(f32 x) {
  f32 e = f32_exp(x > 20.0f ? 20.0f : x), w = e * (e + 2.0f);
  return x * (w / (w + 2.0f));
}
/* odd over even; exactly 1 from the bound on, as above */
INLINE f32 f32_erf(f32 x) {
  f32 c = x > 3.875f ? 3.875f : x; c = c < -3.875f ? -3.875f : c;
  f32 s = c * c, p = 2.11676274e-6f, q = 3.88267472e-5f;
  p = p * s + 2.85824062e-4f; p = p * s + 3.66170565e-3f; p = p * s + 5.24443388e-2f;
  p = p * s + 1.87558144e-1f; p = p * s + 1.12837911f;
  q = q * s + 1.14330114e-3f; q = q * s + 1.47604113e-2f; q = q * s + 1.12997226e-1f;
  q = q * s + 4.99551982e-1f; q = q * s + 1.0f;
  f32 v = c * p / q;
  v = v > 1.0f ? 1.0f : v;
  return v < -1.0f ? -1.0f : v;
}
INLINE f32 f32_sinh(f32 x) {
  f32 a = f32_fabs(x), z = x * x, h = f32_exp(0.5f * a);
  f32 p = 2.03721912945e-4f;
  p = p * z + 8.33028376239e-3f; p = p * z + 1.66667160211e-1f;
  f32 far = 0.5f * h * h - 0.5f / (h * h);
  return a < 1.0f ? p * z * x + x : f32_copysign(far, x);
}
INLINE f32 f32_cosh(f32 x) {
  f32 h = f32_exp(0.5f * f32_fabs(x));
  return 0.5f * h * h + 0.5f / (h * h);
}
INLINE f32 f32_asinh(f32 x) {
  f32 a = f32_fabs(x), c = a > 1e9f ? 1e9f : a, s = c * c;
  f32 near = f32_log1p(c + s / (1.0f + f32_sqrt(s + 1.0f)));
  return f32_copysign(a > 1e9f ? f32_log(a) + F32_LN2 : near, x);
}
INLINE f32 f32_acosh(f32 x) {
  f32 t = (x > 1e9f ? 1e9f : x) - 1.0f;
  f32 near = f32_log1p(t + f32_sqrt(t * (t + 2.0f)));
  return x < 1.0f ? F32_NAN : x > 1e9f ? f32_log(x) + F32_LN2 : near;
}
INLINE f32 f32_atanh(f32 x) {
  f32 a = f32_fabs(x);
  return f32_copysign(0.5f * f32_log1p(2.0f * a / (1.0f - a)), x);
}
"""

TRIGONOMETRY = """
#ifdef WITHOUT_FP64
#define f32_sin sin
#define f32_cos cos
#define f32_tan tan
#else
/* x - n pi/2, and n modulo 4. Numbers above 2^50 (their neighbours are 2^27 apart) and NaN are taken for 2^50. */
INLINE f32 f32_quadrant(f32 x, i32* quadrant) {
  f32 c = x < 0x1p50f ? x : 0x1p50f; c = c < -0x1p50f ? -0x1p50f : c;
  f64 d = c, n = __builtin_rint(d * 0.63661977236758134308);
  f64 r = d - n * 1.57079632679489661923;
  r = r - n * 6.12323399573676603587e-17;
  *quadrant = (i32)(n - 4.0 * __builtin_floor(n * 0.25));
  return (f32)r + (x - x); /* NaN for NaN and infinities */
}
/* for |r| <= pi/4 */
INLINE f32 f32_sin_near(f32 r) {
  f32 z = r * r, p = -1.9515295891e-4f;
  p = p * z + 8.3321608736e-3f; p = p * z - 1.6666654611e-1f;
  return p * z * r + r;
}
INLINE f32 f32_cos_near(f32 r) {
  f32 z = r * r, p = 2.443315711809948e-5f;
  p = p * z - 1.388731625493765e-3f; p = p * z + 4.166664568298827e-2f;
  return p * z * z - 0.5f * z + 1.0f;
}
INLINE f32 f32_wave(f32 r, i32 q) {
  f32 v = q & 1 ? f32_cos_near(r) : f32_sin_near(r);
  return q & 2 ? -v : v;
}
INLINE f32 f32_sin(f32 x) { i32 q; f32 r = f32_quadrant(x, &q); return f32_wave(r, q); }
INLINE f32 f32_cos(f32 x) { i32 q; f32 r = f32_quadrant(x, &q); return f32_wave(r, q + 1); }
INLINE f32 f32_tan(f32 x) {
  i32 q; f32 r = f32_quadrant(x, &q), s = f32_sin_near(r), c = f32_cos_near(r);
  return q & 1 ? -c / s : s / c;
}
#endif
/* asin(s) where z = s * s, for s <= 1/2 */
INLINE f32 f32_asin_near(f32 s, f32 z) {
  f32 p = 4.2163199048e-2f;
  p = p * z + 2.4181311049e-2f; p = p * z + 4.5470025998e-2f; p = p * z + 7.4953002686e-2f;
  p = p * z + 1.6666752422e-1f;
  return p * z * s + s;
}
INLINE f32 f32_asin(f32 x) {
  f32 a = f32_fabs(x), h = 0.5f * (1.0f - a), z = a > 0.5f ? h : a * a, s = a > 0.5f ? f32_sqrt(h) : a;
  f32 v = f32_asin_near(s, z);
  return f32_copysign(a > 0.5f ? 1.57079632679489661923f - 2.0f * v : v, x);
}
INLINE f32 f32_acos(f32 x) {
  f32 a = f32_fabs(x), h = 0.5f * (1.0f - a), z = a > 0.5f ? h : a * a, s = a > 0.5f ? f32_sqrt(h) : x;
  f32 v = f32_asin_near(s, z), far = x < 0.0f ? 3.14159265358979323846f - 2.0f * v : 2.0f * v;
  return a > 0.5f ? far : 1.57079632679489661923f - v;
}
INLINE f32 f32_atan(f32 x) {
  f32 a = f32_fabs(x);
  f32 t = a > 2.414213562373095f ? -1.0f / a : a > 0.4142135623730950f ? (a - 1.0f) / (a + 1.0f) : a;
  f32 y = a > 2.414213562373095f ? 1.57079632679489661923f : a > 0.4142135623730950f ? 0.78539816339744830962f : 0.0f;
  f32 z = t * t, p = 8.05374449538e-2f;
  p = p * z - 1.38776856032e-1f; p = p * z + 1.99777106478e-1f; p = p * z - 3.33329491539e-1f;
  return f32_copysign(y + (p * z * t + t), x);
}
"""

POWER = """
#ifdef WITHOUT_FP64
#define f32_pow pow
#else
/* The logarithm in f64: its error is multiplied by y. Frequent powers come first, which a loop decides once. */
INLINE f32 f32_pow(f32 x, f32 y) {
  if (y == 2.0f) return x * x;
  if (y == 0.5f) return x == -F32_INFINITY ? F32_INFINITY : f32_sqrt(x);
  if (y == 3.0f) return x * x * x;
  if (y == 1.0f) return x;
  if (y == -1.0f) return 1.0f / x;
  f32 a = f32_fabs(x);
  i32 e = f32_exponent(a);
  f64 m = f32_mantissa(a, e), s = (m - 1.0) / (m + 1.0), z = s * s;
  f64 p = 1.0 / 15;
  p = p * z + 1.0 / 13; p = p * z + 1.0 / 11; p = p * z + 1.0 / 9;
  p = p * z + 1.0 / 7; p = p * z + 1.0 / 5; p = p * z + 1.0 / 3; p = p * z + 1.0;
  f64 t = y * (e + p * s * 2.88539008177792681472);
  t = t > 129.0 ? 129.0 : t; t = t < -126.0 ? -126.0 : t;
  f64 n = __builtin_rint(t);
  f32 r = (f32)(t - n) * F32_LN2, v = f32_exp_rest(r) + r + 1.0f;
  v = (v + v) * f32_half_power((f32)n + F32_ROUNDER);
  v = a < 1.17549435e-38f ? (y < 0.0f ? F32_INFINITY : 0.0f) : v;
  v = a == F32_INFINITY ? (y < 0.0f ? 0.0f : F32_INFINITY) : v;
  f32 w = __builtin_truncf(y), h = 0.5f * y;
  bool whole = w == y, odd = whole & (__builtin_truncf(h) != h);
  v = (as_u32(x) >> 31) & (u32)odd ? -v : v;
  v = ((x < 0.0f) & !whole & (a != F32_INFINITY)) ? F32_NAN : v;
  v = ((x != x) | (y != y)) ? x + y : v;
  return ((y == 0.0f) | (x == 1.0f) | ((a == 1.0f) & (f32_fabs(y) == F32_INFINITY))) ? 1.0f : v;
}
#endif
/* wraps around */
INLINE i64 i64_pow(i64 x, i64 n) {
  u64 r = 1, b = (u64)x;
  for (; n > 0; n >>= 1) { r = n & 1 ? r * b : r; b = b * b; }
  return (i64)r;
}
"""

#: Double precision is rare, therefore the functions of the library suffice.
DOUBLE = """
#define f32_fmod(x, y) fmod_f32((f32)(x), (f32)(y))
#ifndef WITHOUT_FP64
ORDER(f64)
#define f64_fabs __builtin_fabs
#define f64_sqrt __builtin_sqrt
#define f64_round __builtin_rint
#define f64_exp f64_of(exp)
#define f64_expm1 f64_of(expm1)
#define f64_log f64_of(log)
#define f64_log1p f64_of(log1p)
#define f64_tanh f64_of(tanh)
#define f64_erf f64_of(erf)
#define f64_sinh f64_of(sinh)
#define f64_cosh f64_of(cosh)
#define f64_asinh f64_of(asinh)
#define f64_acosh f64_of(acosh)
#define f64_atanh f64_of(atanh)
#define f64_sin f64_of(sin)
#define f64_cos f64_of(cos)
#define f64_tan f64_of(tan)
#define f64_asin f64_of(asin)
#define f64_acos f64_of(acos)
#define f64_atan f64_of(atan)
#define f64_fmod(x, y) f64_of(fmod)((f64)(x), (f64)(y))
INLINE f64 f64_sigmoid(f64 x) { return 1.0 / (1.0 + f64_exp(-x)); }
INLINE f64 f64_softplus(f64 x) { return (x < 0.0 ? 0.0 : x) + f64_log1p(f64_exp(-f64_fabs(x))); }
INLINE f64 f64_mish(f64 x) { return x * f64_tanh(f64_softplus(x)); }
INLINE f64 f64_pow(f64 x, f64 y) { return y == 2.0 ? x * x : f64_of(pow)(x, y); }
#endif
"""

MATHEMATICS = ORDER + EXPONENTIAL + TRIGONOMETRY + POWER + DOUBLE

#: the text in front of a kernel, by dialect
PRELUDES = {
    "c": C + REPORTS + VECTORS + CONVERSIONS + MATHEMATICS,
    "opencl": OPENCL + REPORTS + VECTORS + CONVERSIONS + MATHEMATICS,
}


def mathematics_of(text: str) -> str:
    """The functions of `MATHEMATICS` that a text calls, directly or indirectly. Other functions do not change the
    kernel."""
    known, wanted, found = _functions(), _words(text), set[str]()
    while new := [name for name in known if name in wanted and name not in found]:
        found.update(new)
        for name in new:
            wanted = wanted | _words(known[name])
    # ORDER is always included, because macros make the names of its functions.
    return ORDER + "".join(known[name] for name in known if name in found)


@cache
def _functions() -> Mapping[str, str]:
    """Definitions by name, in order. Definitions of one name under different conditions are joined."""
    found: dict[str, str] = {}
    name = ""
    for line in (EXPONENTIAL + TRIGONOMETRY + POWER + DOUBLE).splitlines(keepends=True):
        begins = _DEFINITION.match(line)
        if begins is not None:
            name = begins[1] or begins[2]
        if name and not line.startswith(("#if", "#else", "#endif", "/*")):
            found[name] = found.get(name, "") + line
    return found


_DEFINITION = re.compile(r"INLINE\s[^(]*?(\w+)\(|#define\s+(\w+)")


@lru_cache(1 << 10)
def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", text))
