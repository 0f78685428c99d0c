/* What a text in OpenCL C 1.2 may use on the CPU device: types, constants and functions. Compiled in front of it.

Names that a text must not define begin with OCL_, ocl_ or tunewright_. What is missing here is an error that names it:
clang takes no call of a function that nobody declared. Functions are good to one unit in the last place where they are
the C library's; those with native_ and half_ are the same ones. */

#define __OPENCL_VERSION__ 120
#define OCL_FN static inline __attribute__((overloadable, always_inline, unused))

/* ---- types ------------------------------------------------------------------------------------------------------ */

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __INTPTR_TYPE__ intptr_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef uint cl_mem_fence_flags;

#define OCL_VECTOR(T, n) typedef T T##n __attribute__((ext_vector_type(n)));
#define OCL_VECTORS(T) OCL_VECTOR(T, 2) OCL_VECTOR(T, 3) OCL_VECTOR(T, 4) OCL_VECTOR(T, 8) OCL_VECTOR(T, 16)
OCL_VECTORS(char) OCL_VECTORS(uchar) OCL_VECTORS(short) OCL_VECTORS(ushort) OCL_VECTORS(int)
OCL_VECTORS(uint) OCL_VECTORS(long) OCL_VECTORS(ulong) OCL_VECTORS(float) OCL_VECTORS(double)

/* M(T, n, V, ...) for each width above one; OCL_n(T, n) is the type of so many */
#define OCL_WIDTHS(M, T, ...) \
  M(T, 2, T##2, __VA_ARGS__) M(T, 3, T##3, __VA_ARGS__) M(T, 4, T##4, __VA_ARGS__) M(T, 8, T##8, __VA_ARGS__) \
  M(T, 16, T##16, __VA_ARGS__)
#define OCL_FLOATS(M, ...) M(float, __VA_ARGS__) M(double, __VA_ARGS__)
#define OCL_SIGNED(M, ...) M(char, __VA_ARGS__) M(short, __VA_ARGS__) M(int, __VA_ARGS__) M(long, __VA_ARGS__)
#define OCL_UNSIGNED(M, ...) M(uchar, __VA_ARGS__) M(ushort, __VA_ARGS__) M(uint, __VA_ARGS__) M(ulong, __VA_ARGS__)
#define OCL_INTEGERS(M, ...) OCL_SIGNED(M, __VA_ARGS__) OCL_UNSIGNED(M, __VA_ARGS__)
#define OCL_TYPES(M, ...) OCL_INTEGERS(M, __VA_ARGS__) OCL_FLOATS(M, __VA_ARGS__)
#define OCL_LOOP(n, what) for (int i = 0; i < n; i++) what

/* ---- constants -------------------------------------------------------------------------------------------------- */

#define CHAR_BIT 8
#define SCHAR_MAX 127
#define SCHAR_MIN (-128)
#define CHAR_MAX 127
#define CHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 0xffffffffU
#define LONG_MAX 0x7fffffffffffffffL
#define LONG_MIN (-0x7fffffffffffffffL - 1)
#define ULONG_MAX 0xffffffffffffffffUL
#define FLT_DIG 6
#define FLT_MANT_DIG 24
#define FLT_MAX_10_EXP 38
#define FLT_MAX_EXP 128
#define FLT_MIN_10_EXP (-37)
#define FLT_MIN_EXP (-125)
#define FLT_RADIX 2
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1.0p-126f
#define FLT_EPSILON 0x1.0p-23f
#define DBL_DIG 15
#define DBL_MANT_DIG 53
#define DBL_MAX_EXP 1024
#define DBL_MIN_EXP (-1021)
#define DBL_MAX 0x1.fffffffffffffp1023
#define DBL_MIN 0x1.0p-1022
#define DBL_EPSILON 0x1.0p-52
#define MAXFLOAT FLT_MAX
#define HUGE_VALF __builtin_huge_valf()
#define HUGE_VAL __builtin_huge_val()
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_E 2.71828182845904523536
#define M_LOG2E 1.44269504088896340736
#define M_LOG10E 0.43429448190325182765
#define M_LN2 0.69314718055994530942
#define M_LN10 2.30258509299404568402
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.78539816339744830962
#define M_1_PI 0.31830988618379067154
#define M_2_PI 0.63661977236758134308
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440

/* ---- work-items: who calls keeps count of them (opencl_c.c) ------------------------------------------------------- */

extern size_t tunewright_global_id(uint n);
__constant size_t ocl_global[3] = {OCL_GLOBAL}, ocl_local[3] = {OCL_LOCAL};
OCL_FN uint get_work_dim(void) { return OCL_DIMENSIONS; }
OCL_FN size_t get_global_size(uint n) { return n < 3 ? ocl_global[n] : 1; }
OCL_FN size_t get_local_size(uint n) { return n < 3 ? ocl_local[n] : 1; }
OCL_FN size_t get_num_groups(uint n) { return get_global_size(n) / get_local_size(n); }
OCL_FN size_t get_global_id(uint n) { return n < 3 ? tunewright_global_id(n) : 0; }
OCL_FN size_t get_local_id(uint n) { return get_global_id(n) % get_local_size(n); }
OCL_FN size_t get_group_id(uint n) { return get_global_id(n) / get_local_size(n); }
OCL_FN size_t get_global_offset(uint n) { (void)n; return 0; }

#define CLK_LOCAL_MEM_FENCE 1
#define CLK_GLOBAL_MEM_FENCE 2
OCL_FN void mem_fence(cl_mem_fence_flags flags) { (void)flags; __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#define read_mem_fence mem_fence
#define write_mem_fence mem_fence
#ifdef OCL_GROUPS
/* Work-items of a group run one after the other here, so they cannot wait for each other. */
#define OCL_PRAGMA(what) _Pragma(#what)
#define OCL_REFUSE(what) OCL_PRAGMA(GCC error what)
#define barrier(flags) \
  OCL_REFUSE("the CPU device runs work-items of a group one after the other: barrier() needs groups of one") mem_fence(flags)
#define __local \
  OCL_REFUSE("the CPU device runs work-items of a group one after the other: __local memory needs groups of one") __private
#define local __local
#else
/* A group of one work-item shares with nobody. */
#define barrier mem_fence
#define __local __private
#define local __private
#endif

/* ---- bits and conversions ----------------------------------------------------------------------------------------- */

/* as_T and convert_T are macros over these, which `opencl_c.py` writes. */

/* to the widest type of a kind, from which the functions that saturate go on */
#define OCL_WIDE_V(T, n, V, W) OCL_FN W##n ocl_wide(V x) { return __builtin_convertvector(x, W##n); }
#define OCL_WIDE(T, W) OCL_FN W ocl_wide(T x) { return x; } OCL_WIDTHS(OCL_WIDE_V, T, W)
OCL_SIGNED(OCL_WIDE, long) OCL_UNSIGNED(OCL_WIDE, ulong) OCL_FLOATS(OCL_WIDE, double)

#define OCL_SATURATE_V(T, n, V, W) OCL_FN V ocl_saturate_##T(W##n x) { V r; OCL_LOOP(n, r[i] = ocl_saturate_##T(x[i])); return r; }
#define OCL_SATURATE(T, least, most, least_long, most_double) \
  OCL_FN T ocl_saturate_##T(long x) { return x < least_long ? least : x > 0 && (ulong)x > most ? most : (T)x; } \
  OCL_FN T ocl_saturate_##T(ulong x) { return x > most ? most : (T)x; } \
  OCL_FN T ocl_saturate_##T(double x) { return x <= (double)least ? least : x >= most_double ? most : x != x ? 0 : (T)x; } \
  OCL_WIDTHS(OCL_SATURATE_V, T, long) OCL_WIDTHS(OCL_SATURATE_V, T, ulong) OCL_WIDTHS(OCL_SATURATE_V, T, double)
OCL_SATURATE(char, CHAR_MIN, CHAR_MAX, CHAR_MIN, 127.0)
OCL_SATURATE(uchar, 0, UCHAR_MAX, 0, 255.0)
OCL_SATURATE(short, SHRT_MIN, SHRT_MAX, SHRT_MIN, 32767.0)
OCL_SATURATE(ushort, 0, USHRT_MAX, 0, 65535.0)
OCL_SATURATE(int, (INT_MIN), INT_MAX, (INT_MIN), 2147483647.0)
OCL_SATURATE(uint, 0, UINT_MAX, 0, 4294967295.0)
OCL_SATURATE(long, (LONG_MIN), LONG_MAX, (LONG_MIN), 0x1.0p63)
OCL_SATURATE(ulong, 0, ULONG_MAX, 0, 0x1.0p64)

/* what is whole already stays */
#define OCL_WHOLE_V(T, n, V, name) OCL_FN V name(V x) { return x; }
#define OCL_WHOLE(T, name) OCL_FN T name(T x) { return x; } OCL_WIDTHS(OCL_WHOLE_V, T, name)
#define OCL_ROUND_V(T, n, V, name, to) OCL_FN V name(V x) { V r; OCL_LOOP(n, r[i] = name(x[i])); return r; }
#define OCL_ROUND(name, to) \
  OCL_INTEGERS(OCL_WHOLE, name) OCL_FN float name(float x) { return to##f(x); } OCL_FN double name(double x) { return to(x); } \
  OCL_WIDTHS(OCL_ROUND_V, float, name, to) OCL_WIDTHS(OCL_ROUND_V, double, name, to)
OCL_ROUND(ocl_rte, __builtin_rint) OCL_ROUND(ocl_rtz, __builtin_trunc)
OCL_ROUND(ocl_rtp, __builtin_ceil) OCL_ROUND(ocl_rtn, __builtin_floor)

/* ---- memory ------------------------------------------------------------------------------------------------------- */

#define OCL_LOAD_V(T, n, V, S) OCL_FN V vload##n(size_t at, const S T* p) { V r; OCL_LOOP(n, r[i] = p[at * n + i]); return r; }
#define OCL_LOAD(T, S) OCL_WIDTHS(OCL_LOAD_V, T, S)
#define OCL_STORE_V(T, n, V, S) OCL_FN void vstore##n(V v, size_t at, S T* p) { OCL_LOOP(n, p[at * n + i] = v[i]); }
#define OCL_STORE(T, S) OCL_WIDTHS(OCL_STORE_V, T, S)
OCL_TYPES(OCL_LOAD, __global) OCL_TYPES(OCL_LOAD, __constant) OCL_TYPES(OCL_LOAD, __private)
OCL_TYPES(OCL_STORE, __global) OCL_TYPES(OCL_STORE, __private)
#define OCL_PREFETCH(T, none) OCL_FN void prefetch(const __global T* p, size_t count) { (void)p; (void)count; }
OCL_TYPES(OCL_PREFETCH, )

#define OCL_ATOMIC(T, prefix) \
  OCL_FN T prefix##_add(volatile __global T* p, T x) { return __atomic_fetch_add(p, x, __ATOMIC_RELAXED); } \
  OCL_FN T prefix##_sub(volatile __global T* p, T x) { return __atomic_fetch_sub(p, x, __ATOMIC_RELAXED); } \
  OCL_FN T prefix##_and(volatile __global T* p, T x) { return __atomic_fetch_and(p, x, __ATOMIC_RELAXED); } \
  OCL_FN T prefix##_or(volatile __global T* p, T x) { return __atomic_fetch_or(p, x, __ATOMIC_RELAXED); } \
  OCL_FN T prefix##_xor(volatile __global T* p, T x) { return __atomic_fetch_xor(p, x, __ATOMIC_RELAXED); } \
  OCL_FN T prefix##_min(volatile __global T* p, T x) { return __atomic_fetch_min(p, x, __ATOMIC_RELAXED); } \
  OCL_FN T prefix##_max(volatile __global T* p, T x) { return __atomic_fetch_max(p, x, __ATOMIC_RELAXED); } \
  OCL_FN T prefix##_xchg(volatile __global T* p, T x) { return __atomic_exchange_n(p, x, __ATOMIC_RELAXED); } \
  OCL_FN T prefix##_inc(volatile __global T* p) { return __atomic_fetch_add(p, 1, __ATOMIC_RELAXED); } \
  OCL_FN T prefix##_dec(volatile __global T* p) { return __atomic_fetch_sub(p, 1, __ATOMIC_RELAXED); } \
  OCL_FN T prefix##_cmpxchg(volatile __global T* p, T old, T x) { \
    __atomic_compare_exchange_n(p, &old, x, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
    return old; \
  }
OCL_ATOMIC(int, atomic) OCL_ATOMIC(uint, atomic)
OCL_ATOMIC(int, atom) OCL_ATOMIC(uint, atom) OCL_ATOMIC(long, atom) OCL_ATOMIC(ulong, atom)
OCL_FN float atomic_xchg(volatile __global float* p, float x) {
  return as_float(__atomic_exchange_n((volatile __global uint*)p, as_uint(x), __ATOMIC_RELAXED));
}

/* ---- functions of each element ------------------------------------------------------------------------------------ */

/* OCL_EACH_k: the function of k vectors from the function of k numbers; with _Vs the last one or two may be numbers */
#define OCL_EACH_1(T, n, V, name) OCL_FN V name(V x) { V r; OCL_LOOP(n, r[i] = name(x[i])); return r; }
#define OCL_EACH_2(T, n, V, name) OCL_FN V name(V x, V y) { V r; OCL_LOOP(n, r[i] = name(x[i], y[i])); return r; }
#define OCL_EACH_3(T, n, V, name) OCL_FN V name(V x, V y, V z) { V r; OCL_LOOP(n, r[i] = name(x[i], y[i], z[i])); return r; }
#define OCL_EACH_VT(T, n, V, name) OCL_FN V name(V x, T y) { return name(x, (V)y); }
#define OCL_EACH_VTT(T, n, V, name) OCL_FN V name(V x, T y, T z) { return name(x, (V)y, (V)z); }
#define OCL_EACH_VVT(T, n, V, name) OCL_FN V name(V x, V y, T z) { return name(x, y, (V)z); }
#define OCL_EACH_TV(T, n, V, name) OCL_FN V name(T x, V y) { return name((V)x, y); }
#define OCL_EACH_TTV(T, n, V, name) OCL_FN V name(T x, T y, V z) { return name((V)x, (V)y, z); }
/* with whole numbers in, or out */
#define OCL_EACH_VI(T, n, V, name) \
  OCL_FN V name(V x, int##n k) { V r; OCL_LOOP(n, r[i] = name(x[i], k[i])); return r; } \
  OCL_FN V name(V x, int k) { return name(x, (int##n)k); }
#define OCL_EACH_I(T, n, V, name) OCL_FN int##n name(V x) { int##n r; OCL_LOOP(n, r[i] = name(x[i])); return r; }

/* the function of floats and doubles that is this expression of x (y, z); CAST makes a constant one of its type */
#define OCL_MATH_1(name, f32, f64) \
  OCL_FN float name(float x) { return f32; } OCL_FN double name(double x) { return f64; } \
  OCL_WIDTHS(OCL_EACH_1, float, name) OCL_WIDTHS(OCL_EACH_1, double, name)
#define OCL_MATH_2(name, f32, f64) \
  OCL_FN float name(float x, float y) { return f32; } OCL_FN double name(double x, double y) { return f64; } \
  OCL_WIDTHS(OCL_EACH_2, float, name) OCL_WIDTHS(OCL_EACH_2, double, name)
#define OCL_MATH_3(name, f32, f64) \
  OCL_FN float name(float x, float y, float z) { return f32; } \
  OCL_FN double name(double x, double y, double z) { return f64; } \
  OCL_WIDTHS(OCL_EACH_3, float, name) OCL_WIDTHS(OCL_EACH_3, double, name)

/* the C library's */
#define OCL_C_1(name) \
  extern float ocl_##name##f(float) __asm__(#name "f"); extern double ocl_##name(double) __asm__(#name);
#define OCL_C_2(name) \
  extern float ocl_##name##f(float, float) __asm__(#name "f"); extern double ocl_##name(double, double) __asm__(#name);
#define OCL_LIBRARY_1(name) OCL_C_1(name) OCL_MATH_1(name, ocl_##name##f(x), ocl_##name(x))
#define OCL_LIBRARY_2(name) OCL_C_2(name) OCL_MATH_2(name, ocl_##name##f(x, y), ocl_##name(x, y))
#define OCL_COMPILER_1(name) OCL_MATH_1(name, __builtin_##name##f(x), __builtin_##name(x))
#define OCL_COMPILER_2(name) OCL_MATH_2(name, __builtin_##name##f(x, y), __builtin_##name(x, y))
OCL_COMPILER_1(fabs) OCL_COMPILER_1(floor) OCL_COMPILER_1(ceil) OCL_COMPILER_1(trunc) OCL_COMPILER_1(rint)
OCL_COMPILER_1(round) OCL_COMPILER_1(sqrt) OCL_COMPILER_2(copysign)
OCL_LIBRARY_1(exp) OCL_LIBRARY_1(exp2) OCL_LIBRARY_1(expm1) OCL_LIBRARY_1(log) OCL_LIBRARY_1(log2) OCL_LIBRARY_1(log10)
OCL_LIBRARY_1(log1p) OCL_LIBRARY_1(logb) OCL_LIBRARY_1(cbrt) OCL_LIBRARY_1(sin) OCL_LIBRARY_1(cos) OCL_LIBRARY_1(tan)
OCL_LIBRARY_1(asin) OCL_LIBRARY_1(acos) OCL_LIBRARY_1(atan) OCL_LIBRARY_1(sinh) OCL_LIBRARY_1(cosh) OCL_LIBRARY_1(tanh)
OCL_LIBRARY_1(asinh) OCL_LIBRARY_1(acosh) OCL_LIBRARY_1(atanh) OCL_LIBRARY_1(erf) OCL_LIBRARY_1(erfc)
OCL_LIBRARY_1(lgamma) OCL_LIBRARY_1(tgamma)
OCL_LIBRARY_2(pow) OCL_LIBRARY_2(atan2) OCL_LIBRARY_2(fmod) OCL_LIBRARY_2(remainder) OCL_LIBRARY_2(hypot)
OCL_LIBRARY_2(nextafter)
OCL_MATH_1(rsqrt, 1.0f / __builtin_sqrtf(x), 1.0 / __builtin_sqrt(x))
OCL_MATH_1(exp10, (float)ocl_pow(10.0, x), ocl_pow(10.0, x))
OCL_MATH_1(sinpi, (float)ocl_sin(M_PI * ocl_remainder(x, 2.0)), ocl_sin(M_PI * ocl_remainder(x, 2.0)))
OCL_MATH_1(cospi, (float)ocl_cos(M_PI * ocl_remainder(x, 2.0)), ocl_cos(M_PI * ocl_remainder(x, 2.0)))
OCL_MATH_1(tanpi, (float)ocl_tan(M_PI * ocl_remainder(x, 1.0)), ocl_tan(M_PI * ocl_remainder(x, 1.0)))
OCL_MATH_1(asinpi, (float)(ocl_asin(x) * M_1_PI), ocl_asin(x) * M_1_PI)
OCL_MATH_1(acospi, (float)(ocl_acos(x) * M_1_PI), ocl_acos(x) * M_1_PI)
OCL_MATH_1(atanpi, (float)(ocl_atan(x) * M_1_PI), ocl_atan(x) * M_1_PI)
OCL_MATH_2(atan2pi, (float)(ocl_atan2(x, y) * M_1_PI), ocl_atan2(x, y) * M_1_PI)
OCL_MATH_2(powr, x < 0.0f ? NAN : pow(x, y), x < 0.0 ? NAN : pow(x, y))
OCL_MATH_2(fdim, x != x || y != y ? NAN : x > y ? x - y : 0.0f, x != x || y != y ? NAN : x > y ? x - y : 0.0)
/* the other one where one is not a number */
OCL_MATH_2(fmax, x != x || x < y ? y : x, x != x || x < y ? y : x)
OCL_MATH_2(fmin, x != x || y < x ? y : x, x != x || y < x ? y : x)
OCL_MATH_2(maxmag, fabs(x) > fabs(y) ? x : fabs(y) > fabs(x) ? y : fmax(x, y),
           fabs(x) > fabs(y) ? x : fabs(y) > fabs(x) ? y : fmax(x, y))
OCL_MATH_2(minmag, fabs(x) < fabs(y) ? x : fabs(y) < fabs(x) ? y : fmin(x, y),
           fabs(x) < fabs(y) ? x : fabs(y) < fabs(x) ? y : fmin(x, y))
OCL_MATH_3(fma, __builtin_fmaf(x, y, z), __builtin_fma(x, y, z))
OCL_MATH_3(mad, x * y + z, x * y + z)
#define OCL_SECOND_MAY_BE_A_NUMBER(name) OCL_WIDTHS(OCL_EACH_VT, float, name) OCL_WIDTHS(OCL_EACH_VT, double, name)
OCL_SECOND_MAY_BE_A_NUMBER(fmax) OCL_SECOND_MAY_BE_A_NUMBER(fmin)

/* with whole numbers */
extern float ocl_ldexpf(float, int) __asm__("ldexpf"); extern double ocl_ldexp(double, int) __asm__("ldexp");
extern int ocl_ilogbf(float) __asm__("ilogbf"); extern int ocl_ilogb(double) __asm__("ilogb");
OCL_FN float ldexp(float x, int k) { return ocl_ldexpf(x, k); } OCL_FN double ldexp(double x, int k) { return ocl_ldexp(x, k); }
OCL_FN float pown(float x, int k) { return (float)ocl_pow(x, k); } OCL_FN double pown(double x, int k) { return ocl_pow(x, k); }
OCL_FN double rootn(double x, int k) {
  double r = ocl_pow(fabs(x), 1.0 / k);
  return x >= 0.0 ? r : k & 1 ? -r : (double)NAN;
}
OCL_FN float rootn(float x, int k) { return (float)rootn((double)x, k); }
OCL_FN int ilogb(float x) { return ocl_ilogbf(x); } OCL_FN int ilogb(double x) { return ocl_ilogb(x); }
#define OCL_WITH_WHOLE(T, none) \
  OCL_WIDTHS(OCL_EACH_VI, T, ldexp) OCL_WIDTHS(OCL_EACH_VI, T, pown) OCL_WIDTHS(OCL_EACH_VI, T, rootn) \
  OCL_WIDTHS(OCL_EACH_I, T, ilogb)
OCL_FLOATS(OCL_WITH_WHOLE, )
OCL_FN float nan(uint code) { return as_float(0x7fc00000u | code); }
OCL_FN double nan(ulong code) { return as_double(0x7ff8000000000000ul | code); }

/* with a second result behind a pointer */
#define OCL_TWO_V(T, n, V, S) \
  OCL_FN V fract(V x, S V* whole) { V r; OCL_LOOP(n, { T w; r[i] = fract(x[i], &w); (*whole)[i] = w; }); return r; } \
  OCL_FN V modf(V x, S V* whole) { V r; OCL_LOOP(n, { T w; r[i] = modf(x[i], &w); (*whole)[i] = w; }); return r; } \
  OCL_FN V sincos(V x, S V* cosine) { *cosine = cos(x); return sin(x); } \
  OCL_FN V frexp(V x, S int##n* power) { V r; OCL_LOOP(n, { int k; r[i] = frexp(x[i], &k); (*power)[i] = k; }); return r; }
#define OCL_TWO(T, S, most) \
  OCL_FN T fract(T x, S T* whole) { *whole = floor(x); return fmin(x - floor(x), most); } \
  OCL_FN T modf(T x, S T* whole) { *whole = trunc(x); return copysign(fabs(x) == (T)INFINITY ? (T)0 : x - trunc(x), x); } \
  OCL_FN T sincos(T x, S T* cosine) { *cosine = cos(x); return sin(x); } \
  OCL_FN T frexp(T x, S int* power) { \
    int k = x == 0 || x != x || fabs(x) == (T)INFINITY ? 0 : ilogb(x) + 1; \
    *power = k; \
    return k ? ldexp(x, -k) : x; \
  }
OCL_TWO(float, __private, 0x1.fffffep-1f) OCL_TWO(double, __private, 0x1.fffffffffffffp-1)
OCL_TWO(float, __global, 0x1.fffffep-1f) OCL_TWO(double, __global, 0x1.fffffffffffffp-1)
OCL_WIDTHS(OCL_TWO_V, float, __private) OCL_WIDTHS(OCL_TWO_V, double, __private)
OCL_WIDTHS(OCL_TWO_V, float, __global) OCL_WIDTHS(OCL_TWO_V, double, __global)

/* faster ones need not be less exact */
#define half_cos(x) cos((x))
#define half_divide(x, y) ((x) / (y))
#define half_exp(x) exp((x))
#define half_exp2(x) exp2((x))
#define half_exp10(x) exp10((x))
#define half_log(x) log((x))
#define half_log2(x) log2((x))
#define half_log10(x) log10((x))
#define half_powr(x, y) powr((x), (y))
#define half_recip(x) (1.0f / (x))
#define half_rsqrt(x) rsqrt((x))
#define half_sin(x) sin((x))
#define half_sqrt(x) sqrt((x))
#define half_tan(x) tan((x))
#define native_cos(x) cos((x))
#define native_divide(x, y) ((x) / (y))
#define native_exp(x) exp((x))
#define native_exp2(x) exp2((x))
#define native_exp10(x) exp10((x))
#define native_log(x) log((x))
#define native_log2(x) log2((x))
#define native_log10(x) log10((x))
#define native_powr(x, y) powr((x), (y))
#define native_recip(x) (1.0f / (x))
#define native_rsqrt(x) rsqrt((x))
#define native_sin(x) sin((x))
#define native_sqrt(x) sqrt((x))
#define native_tan(x) tan((x))

/* common */
OCL_MATH_1(degrees, x * (180.0f / M_PI_F), x * (180.0 / M_PI))
OCL_MATH_1(radians, x * (M_PI_F / 180.0f), x * (M_PI / 180.0))
OCL_MATH_1(sign, x != x ? 0.0f : x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x, x != x ? 0.0 : x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : x)
OCL_MATH_2(step, y < x ? 0.0f : 1.0f, y < x ? 0.0 : 1.0)
OCL_MATH_2(max, x < y ? y : x, x < y ? y : x)
OCL_MATH_2(min, y < x ? y : x, y < x ? y : x)
OCL_MATH_3(clamp, fmin(fmax(x, y), z), fmin(fmax(x, y), z))
OCL_MATH_3(mix, x + (y - x) * z, x + (y - x) * z)
OCL_FN float smoothstep(float a, float b, float x) { float t = clamp((x - a) / (b - a), 0.0f, 1.0f); return t * t * (3.0f - 2.0f * t); }
OCL_FN double smoothstep(double a, double b, double x) { double t = clamp((x - a) / (b - a), 0.0, 1.0); return t * t * (3.0 - 2.0 * t); }
#define OCL_COMMON(T, none) \
  OCL_WIDTHS(OCL_EACH_VT, T, max) OCL_WIDTHS(OCL_EACH_VT, T, min) OCL_WIDTHS(OCL_EACH_VTT, T, clamp) \
  OCL_WIDTHS(OCL_EACH_VVT, T, mix) OCL_WIDTHS(OCL_EACH_TV, T, step) OCL_WIDTHS(OCL_EACH_3, T, smoothstep) \
  OCL_WIDTHS(OCL_EACH_TTV, T, smoothstep)
OCL_FLOATS(OCL_COMMON, )

/* ---- of whole numbers --------------------------------------------------------------------------------------------- */

#define OCL_WHOLE_1(T, name, R, what) \
  OCL_FN R name(T x) { return what; } OCL_WIDTHS(OCL_EACH_R1, T, name, R)
#define OCL_EACH_R1(T, n, V, name, R) OCL_FN R##n name(V x) { R##n r; OCL_LOOP(n, r[i] = name(x[i])); return r; }
#define OCL_EACH_R2(T, n, V, name, R) OCL_FN R##n name(V x, V y) { R##n r; OCL_LOOP(n, r[i] = name(x[i], y[i])); return r; }
#define OCL_WHOLE_2(T, name, what) OCL_FN T name(T x, T y) { return what; } OCL_WIDTHS(OCL_EACH_2, T, name)
#define OCL_WHOLE_3(T, name, what) OCL_FN T name(T x, T y, T z) { return what; } OCL_WIDTHS(OCL_EACH_3, T, name)
/* W holds a product; `less` is the difference where it may be negative */
#define OCL_WHOLE_ALL(T, U, bits, W, less) \
  OCL_WHOLE_2(T, max, x < y ? y : x) OCL_WIDTHS(OCL_EACH_VT, T, max) \
  OCL_WHOLE_2(T, min, y < x ? y : x) OCL_WIDTHS(OCL_EACH_VT, T, min) \
  OCL_WHOLE_3(T, clamp, x < y ? y : x > z ? z : x) OCL_WIDTHS(OCL_EACH_VTT, T, clamp) \
  OCL_FN U abs_diff(T x, T y) { return x < y ? (U)y - (U)x : (U)x - (U)y; } OCL_WIDTHS(OCL_EACH_R2, T, abs_diff, U) \
  OCL_WHOLE_2(T, hadd, (T)((x & y) + ((x ^ y) >> 1))) OCL_WHOLE_2(T, rhadd, (T)((x | y) - ((x ^ y) >> 1))) \
  OCL_WHOLE_2(T, rotate, (T)((U)x << ((U)y & (bits - 1)) | (U)x >> (-(U)y & (bits - 1)))) \
  OCL_WHOLE_1(T, popcount, T, (T)__builtin_popcountl((ulong)(U)x)) \
  OCL_WHOLE_1(T, clz, T, (T)((U)x ? __builtin_clzl((ulong)(U)x) - (64 - bits) : bits)) \
  OCL_WHOLE_2(T, add_sat, ocl_bound_##T((W)x + y)) OCL_WHOLE_2(T, sub_sat, less) \
  OCL_WHOLE_2(T, mul_hi, (T)((W)x * y >> bits)) OCL_WHOLE_3(T, mad_hi, (T)((U)((W)x * y >> bits) + (U)z)) \
  OCL_WHOLE_3(T, mad_sat, ocl_bound_##T((W)x * y + z))
typedef __int128 ocl_long;
typedef unsigned __int128 ocl_ulong;
#define OCL_BOUND(T, W, least, most) OCL_FN T ocl_bound_##T(W x) { return x < least ? least : x > most ? most : (T)x; }
OCL_BOUND(char, long, CHAR_MIN, CHAR_MAX) OCL_BOUND(short, long, SHRT_MIN, SHRT_MAX)
OCL_BOUND(int, long, (INT_MIN), INT_MAX) OCL_BOUND(long, ocl_long, (LONG_MIN), LONG_MAX)
OCL_BOUND(uchar, ulong, 0, UCHAR_MAX) OCL_BOUND(ushort, ulong, 0, USHRT_MAX)
OCL_BOUND(uint, ulong, 0, UINT_MAX) OCL_BOUND(ulong, ocl_ulong, 0, ULONG_MAX)
OCL_WHOLE_ALL(char, uchar, 8, long, ocl_bound_char((long)x - y))
OCL_WHOLE_ALL(short, ushort, 16, long, ocl_bound_short((long)x - y))
OCL_WHOLE_ALL(int, uint, 32, long, ocl_bound_int((long)x - y))
OCL_WHOLE_ALL(long, ulong, 64, ocl_long, ocl_bound_long((ocl_long)x - y))
OCL_WHOLE_ALL(uchar, uchar, 8, ulong, (uchar)(x < y ? 0 : x - y))
OCL_WHOLE_ALL(ushort, ushort, 16, ulong, (ushort)(x < y ? 0 : x - y))
OCL_WHOLE_ALL(uint, uint, 32, ulong, x < y ? 0 : x - y)
OCL_WHOLE_ALL(ulong, ulong, 64, ocl_ulong, x < y ? 0 : x - y)
OCL_WHOLE_1(char, abs, uchar, x < 0 ? -(uchar)x : x) OCL_WHOLE_1(short, abs, ushort, x < 0 ? -(ushort)x : x)
OCL_WHOLE_1(int, abs, uint, x < 0 ? -(uint)x : x) OCL_WHOLE_1(long, abs, ulong, x < 0 ? -(ulong)x : x)
OCL_UNSIGNED(OCL_WHOLE, abs)
#define OCL_24(T, none) OCL_WHOLE_2(T, mul24, x * y) OCL_WHOLE_3(T, mad24, x * y + z)
OCL_24(int, ) OCL_24(uint, )
#define OCL_UPSAMPLE_V(T, n, V, U, W) OCL_FN W##n upsample(V x, U##n y) { W##n r; OCL_LOOP(n, r[i] = upsample(x[i], y[i])); return r; }
#define OCL_UPSAMPLE(T, U, W, bits) OCL_FN W upsample(T x, U y) { return (W)((W)x << bits | y); } OCL_WIDTHS(OCL_UPSAMPLE_V, T, U, W)
OCL_UPSAMPLE(char, uchar, short, 8) OCL_UPSAMPLE(uchar, uchar, ushort, 8) OCL_UPSAMPLE(short, ushort, int, 16)
OCL_UPSAMPLE(ushort, ushort, uint, 16) OCL_UPSAMPLE(int, uint, long, 32) OCL_UPSAMPLE(uint, uint, ulong, 32)

/* ---- geometry ----------------------------------------------------------------------------------------------------- */

#define OCL_DOT_V(T, n, V, none) OCL_FN T dot(V x, V y) { T s = 0; OCL_LOOP(n, s += x[i] * y[i]); return s; }
#define OCL_LENGTH_V(T, n, V, none) \
  OCL_FN T length(V x) { return sqrt(dot(x, x)); } OCL_FN T distance(V x, V y) { return length(x - y); } \
  OCL_FN V normalize(V x) { return dot(x, x) == 0 ? x : x / length(x); }
#define OCL_GEOMETRY(T, none) \
  OCL_FN T dot(T x, T y) { return x * y; } OCL_WIDTHS(OCL_DOT_V, T, ) \
  OCL_FN T length(T x) { return fabs(x); } OCL_FN T distance(T x, T y) { return fabs(x - y); } \
  OCL_FN T normalize(T x) { return sign(x); } OCL_WIDTHS(OCL_LENGTH_V, T, ) \
  OCL_FN T##3 cross(T##3 x, T##3 y) { return x.yzx * y.zxy - x.zxy * y.yzx; } \
  OCL_FN T##4 cross(T##4 x, T##4 y) { return (T##4)(cross(x.xyz, y.xyz), 0); }
OCL_FLOATS(OCL_GEOMETRY, )
#define fast_length(x) length((x))
#define fast_distance(x, y) distance((x), (y))
#define fast_normalize(x) normalize((x))

/* ---- comparisons: 1 where numbers are compared, -1 (all bits) where vectors are ------------------------------------- */

#define OCL_COMPARE_V1(T, n, V, name, I) OCL_FN I##n name(V x) { I##n r; OCL_LOOP(n, r[i] = name(x[i]) ? -1 : 0); return r; }
#define OCL_COMPARE_V2(T, n, V, name, I) OCL_FN I##n name(V x, V y) { I##n r; OCL_LOOP(n, r[i] = name(x[i], y[i]) ? -1 : 0); return r; }
#define OCL_COMPARE_1(name, what) \
  OCL_FN int name(float x) { return what; } OCL_WIDTHS(OCL_COMPARE_V1, float, name, int) \
  OCL_FN int name(double x) { return what; } OCL_WIDTHS(OCL_COMPARE_V1, double, name, long)
#define OCL_COMPARE_2(name, what) \
  OCL_FN int name(float x, float y) { return what; } OCL_WIDTHS(OCL_COMPARE_V2, float, name, int) \
  OCL_FN int name(double x, double y) { return what; } OCL_WIDTHS(OCL_COMPARE_V2, double, name, long)
OCL_COMPARE_2(isequal, x == y) OCL_COMPARE_2(isnotequal, x != y) OCL_COMPARE_2(isgreater, x > y)
OCL_COMPARE_2(isgreaterequal, x >= y) OCL_COMPARE_2(isless, x < y) OCL_COMPARE_2(islessequal, x <= y)
OCL_COMPARE_2(islessgreater, x < y || x > y) OCL_COMPARE_2(isordered, x == x && y == y)
OCL_COMPARE_2(isunordered, x != x || y != y)
OCL_COMPARE_1(isnan, x != x) OCL_COMPARE_1(isinf, fabs(x) == INFINITY) OCL_COMPARE_1(isfinite, fabs(x) < INFINITY)
OCL_COMPARE_1(isnormal, fabs(x) < INFINITY && fabs(x) >= (sizeof(x) == 4 ? FLT_MIN : DBL_MIN))
OCL_COMPARE_1(signbit, copysign(1.0f, (float)x) < 0.0f)
#define OCL_ANY_V(T, n, V, none) \
  OCL_FN int any(V x) { int r = 0; OCL_LOOP(n, r |= x[i] < 0); return r; } \
  OCL_FN int all(V x) { int r = 1; OCL_LOOP(n, r &= x[i] < 0); return r; }
#define OCL_ANY(T, none) OCL_FN int any(T x) { return x < 0; } OCL_FN int all(T x) { return x < 0; } OCL_WIDTHS(OCL_ANY_V, T, )
OCL_SIGNED(OCL_ANY, )
/* the bits of one integer type decide about numbers of its size */
#define OCL_SELECT_V(T, n, V, I) \
  OCL_FN V select(V x, V y, I##n c) { V r; OCL_LOOP(n, r[i] = c[i] >> (8 * sizeof(T) - 1) & 1 ? y[i] : x[i]); return r; }
#define OCL_SELECT(T, I) OCL_FN T select(T x, T y, I c) { return c ? y : x; } OCL_WIDTHS(OCL_SELECT_V, T, I)
#define OCL_SELECTS(T, I, U) OCL_SELECT(T, I) OCL_SELECT(T, U)
OCL_SELECTS(char, char, uchar) OCL_SELECTS(uchar, char, uchar) OCL_SELECTS(short, short, ushort)
OCL_SELECTS(ushort, short, ushort) OCL_SELECTS(int, int, uint) OCL_SELECTS(uint, int, uint)
OCL_SELECTS(float, int, uint) OCL_SELECTS(long, long, ulong) OCL_SELECTS(ulong, long, ulong)
OCL_SELECTS(double, long, ulong)
#define OCL_BITSELECT(T, none) OCL_WHOLE_3(T, bitselect, (x & ~z) | (y & z))
OCL_INTEGERS(OCL_BITSELECT, )
OCL_MATH_3(bitselect, as_float(bitselect(as_uint(x), as_uint(y), as_uint(z))),
           as_double(bitselect(as_ulong(x), as_ulong(y), as_ulong(z))))

/* ---- a text's own names ------------------------------------------------------------------------------------------- */

/* OpenCL C has no such functions, so a text may define them. They must not become the C library's. */
#define OCL_OWN_FUNCTIONS
