"""One small graph per decision of a rule: where it applies, and where it refuses and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """``rule`` runs alone on the graph; ``refuses``: it must say no, with a reason."""

    rule: str
    text: str
    name: str = "applies"
    refuses: bool = False
    opset: int = 28
    #: a pass that runs before, to set the stage
    first: str = ""
    config: dict[str, Any] = field(default_factory=dict)


def no(rule: str, text: str, name: str = "refuses", **options: Any) -> Case:
    return Case(rule, text, name, refuses=True, **options)


IDENTITIES = [
    Case("identity", "g (float[2,3] x) => (float[2,3] y) { a = Identity(x) b = Relu(a) y = Identity(b) }"),
    Case("dropout", "g (float[2,3] x) => (float[2,3] y) <float r = {0.5}> { a = Dropout(x, r) y = Relu(a) }"),
    no("dropout", "g (float[2,3] x, bool t) => (float[2,3] y) <float r = {0.5}> { y = Dropout(x, r, t) }", "training"),
    no("dropout", "g (float[2,3] x) => (float[2,3] y, bool[2,3] m) { y, m = Dropout(x) }", "mask"),
    Case("add-zero", "g (float[2,3] x) => (float[2,3] y) <float z = {0}> { a = Add(z, x) y = Sub(a, z) }"),
    no("add-zero", "g (float[1,3] x) => (float[2,3] y) <float[2,1] z = {0,0}> { y = Add(x, z) }"),
    Case("cast-like", "g (float[2,3] x, int32[1] t) => (int32[2,3] y) { y = CastLike(x, t) }"),
    no(
        "cast-like",
        """g (float[2,3] x, bool c) => (float[2,3] y)
        { t = If(c) <then_branch = a () => (float[1] p) { p = Constant<value = float[1] {1}>() },
                     else_branch = b () => (float[1] q) { q = Constant<value = float[1] {2}>() }>
          y = CastLike(x, t) }""",
    ),
    Case(
        "resize-nothing",
        "g (float[1,2,3,3] x) => (float[1,2,3,3] y) <float[4] s = {1,1,1,1}> { a = Resize(x, , s) y = Relu(a) }",
    ),
    Case(
        "resize-nothing",
        """g (float[1,2,3,3] x) => (float[1,2,3,3] y) <int64[4] s = {1,2,3,3}>
        { y = Resize<mode="cubic">(x, , , s) }""",
        "sizes",
    ),
    Case("mul-one", "g (float[2,3] x) => (float[2,3] y) <float[1,3] o = {1,1,1}> { a = Mul(x, o) y = Div(a, o) }"),
    no("mul-one", "g (float[N] x) => (float[M] y) <float[3] o = {1,1,1}> { y = Mul(x, o) }"),
    Case("cast-same", "g (float[2] x) => (float[2] y) { a = Cast<to=1>(x) y = Relu(a) }"),
    no(
        "cast-same",
        """g (bool c, float[2] x) => (float[2] y)
        { a = If (c) <then_branch = t () => (float[2] p) { p = Neg(x) }, else_branch = e () => (float[2] q) { q =
          Abs(x) }>
          y = Cast<to=1>(a) }""",
    ),
    Case("cast-cast", "g (float16[2] x) => (float16[2] y) { a = Cast<to=1>(x) y = Cast<to=10>(a) }"),
    no("cast-cast", "g (float[2] x) => (float[2] y) { a = Cast<to=6>(x) y = Cast<to=1>(a) }"),
    Case("same-shape", "g (float[N,4] x) => (float[N,4] y) <int64[2] s = {0,4}> { a = Reshape(x, s) y = Relu(a) }"),
    Case(
        "same-shape",
        """g (float[2,4] x) => (float[2,4] y) <int64[1] b = {0}, int64[1] e = {9223372036854775807}, int64[1] k = {1}>
        { y = Slice(x, b, e, k) }""",
        "slice",
    ),
    no("same-shape", "g (float[A,B] x) => (float[C,4] y) <int64[2] s = {-1,4}> { y = Reshape(x, s) }"),
    Case("tile-once", "g (float[2,3] x) => (float[2,3] y) <int64[2] r = {1,1}> { a = Tile(x, r) y = Relu(a) }"),
    Case("pad-nothing", "g (float[2,3] x) => (float[2,3] y) <int64[4] p = {0,0,0,0}> { a = Pad(x, p) y = Relu(a) }"),
    Case("single-input", "g (float[2,3] x) => (float[2,3] y) { a = Concat<axis=0>(x) b = Max(a) y = Relu(b) }"),
    Case("clip-nothing", "g (float[2,3] x) => (float[2,3] y) { a = Clip(x) y = Relu(a) }"),
    Case("clip-to-min", "g (float[2,3] x) => (float[2,3] y) <float h = {6}> { y = Clip(x, , h) }"),
    Case("double-inverse", "g (float[2,3] x) => (float[2,3] y) { a = Neg(x) b = Neg(a) y = Relu(b) }"),
    Case("idempotent", "g (float[2,3] x) => (float[2,3] y) { a = Relu(x) b = Relu(a) y = Neg(b) }"),
    no("idempotent", "g (float[2,3] x) => (float[2,3] y) { a = Floor(x) y = Abs(a) }"),
    Case("transpose-identity", "g (float[2,3] x) => (float[2,3] y) { a = Transpose<perm=[0,1]>(x) y = Relu(a) }"),
    no("transpose-identity", "g (float[] x) => (float[] y) { y = Transpose(x) }"),
    no("transpose-pair", "g (float[] x) => (float[] y) { a = Transpose(x) y = Transpose(a) }"),
    Case(
        "transpose-pair",
        "g (float[2,3,4] x) => (float[3,2,4] y) { a = Transpose<perm=[2,0,1]>(x) y = Transpose<perm=[2,1,0]>(a) }",
    ),
    Case("transpose-to-reshape", "g (float[1,3,1,5] x) => (float[1,1,5,3] y) { y = Transpose<perm=[2,0,1,3]>(x) }"),
    no("transpose-to-reshape", "g (float[N,1,M] x) => (float[1,N,M] y) { y = Transpose<perm=[1,0,2]>(x) }"),
    Case(
        "view-chain",
        """g (float[2,3,4] x) => (float[6,4] y) <int64[1] k = {0}, int64[2] s = {6,-1}>
        { a = Flatten(x) b = Unsqueeze(a, k) y = Reshape(b, s) }""",
    ),
    no(
        "view-chain",
        "g (float[N,M] x) => (float[1,1,N,M] y) <int64[1] k = {0}> { a = Unsqueeze(x, k) y = Unsqueeze(a, k) }",
    ),
    Case(
        "known-dimensions",
        "g (float[N,3,H] x) => (int64[2] y) <int64[1] i = {1}, int64[1] o = {7}> { s = Shape(x) c = Gather(s, i) "
        "y = Concat<axis=0>(c, o) }",
    ),
    Case(
        "reshape-target",
        """g (float[N,S,12] x, int64[N,S] ids) => (float[N,S,3,4] y)
        <int64 zero = {0}, int64 one = {1}, int64[1] k = {0}, int64[1] h = {3}, int64[1] d = {4}>
        { s = Shape(ids) n = Gather(s, zero) m = Gather(s, one) p = Unsqueeze(n, k) q = Unsqueeze(m, k)
          t = Concat<axis=0>(p, q, h, d) y = Reshape(x, t) }""",
    ),
    no(
        "reshape-target",
        "g (float[A,B] x, float[C,E] z) => (float[C,E] y) { s = Shape(z) y = Reshape(x, s) }",
    ),
    Case("expand-to-itself", "g (float[N,3] x) => (float[N,3] y) { s = Shape(x) a = Expand(x, s) y = Relu(a) }"),
    no("expand-to-itself", "g (float[N,3] x, float[M,3] z) => (float[Q,3] y) { s = Shape(z) y = Expand(x, s) }"),
    no("known-dimensions", "g (float[N,3,H] x) => (int64[1] y) <int64[1] i = {0}> { s = Shape(x) y = Gather(s, i) }"),
]

CLEAN_UP = [
    Case("dead-code", "g (float[2] x) => (float[2] y) { a = Neg(x) b = Abs(a) y = Relu(x) }"),
    Case(
        "common-subexpressions",
        """g (float[2] x) => (float[2] y) <float p = {2}, float q = {2}>
        { a = Add(x, p) b = Add(x, q) c = Relu(a) d = Relu(b) y = Mul(c, d) }""",
    ),
    Case("propagate", "g (float[2,3] x) => (float[6] y) <int64[2] s = {2,3}> { p = ReduceProd(s) y = Reshape(x, p) }"),
    Case(
        "flush-denormals",
        "g (float[1,2] x) => (float[1,2] y) <float[2,2] w = {1.0, 1e-40, -1e-42, 2.0}> { y = MatMul(x, w) }",
    ),
    Case(
        "sink-constants",
        """g (bool c, float[2] x) => (float[2] y) <float three = {3}>
        { k = Sqrt(three) y = If (c) <then_branch = t () => (float[2] p) { p = Mul(x, k) },
                      else_branch = e () => (float[2] q) { z = Neg(x) q = Add(z, k) }> }""",
        first="propagate",
    ),
    Case(
        "inline-branches",
        """g (float[2] x) => (float[2] y) <bool c = {1}>
        { a = Neg(x) b = If (c) <then_branch = t () => (float[2] p) { p = Mul(x, a) },
                      else_branch = e () => (float[2] q) { q = Relu(x) }> y = Abs(b) }""",
    ),
    Case(
        "unroll-loops",
        """g (float[2] x) => (float[2] y, float[3,2] z) <int64 n = {3}, bool c = {1}>
        { y, z = Loop (n, c, x) <body = b (int64 i, bool ci, float[2] s) => (bool co, float[2] so, float[2] o)
            { co = Identity(ci) k = Cast<to=1>(i) so = Add(s, k) o = Mul(so, x) }> }""",
        "loop",
    ),
    Case(
        "unroll-loops",
        """g (float[2] s0, float[2,3] xs) => (float[2] s, float[2,3] ys)
        { s, ys = Scan <num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1], scan_output_directions=[1],
            body = b (float[2] si, float[2] xi) => (float[2] so, float[2] yi) { so = Add(si, xi) yi = Neg(so) }> (s0,
              xs) }""",
        "scan",
    ),
    Case(
        "unchanged-states",
        """g (float[2] x, float[2,2] w, int64 n) => (float[2] y, float[2,2] v)
        { v, y = Loop (n, , w, x) <body = b (int64 i, bool ci, float[2,2] u, float[2] s) => (bool co, float[2,2] uo,
          float[2] so) { co = Identity(ci) so = MatMul(s, u) uo = Identity(u) }> }""",
        "loop",
    ),
    Case(
        "unchanged-states",
        """g (float[2] s0, float[2] k, float[3,2] xs) => (float[2] s, float[2] r, float[3,2] ys)
        { s, r, ys = Scan <num_scan_inputs=1, body = b (float[2] si, float[2] ki, float[2] xi) =>
          (float[2] so, float[2] ki, float[2] yi) { so = Add(si, xi) yi = Mul(so, ki) }> (s0, k, xs) }""",
        "scan",
    ),
    Case(
        "hoist-invariants",
        """g (float[2,3] w, float[2,2] x, int64 n) => (float[2,2] y)
        { y = Loop (n, , x) <body = b (int64 i, bool ci, float[2,2] s) => (bool co, float[2,2] so)
            { co = Identity(ci) t = Transpose<perm=[1,0]>(w) m = MatMul(w, t) e = Tanh(m) so = MatMul(s, e) }> }""",
    ),
    Case(
        "hoist-invariants",
        """g (float[N,3] x, float[N,3] u, float[3] v, int64 n) => (float[N,3] y)
        { y = Loop (n, , x) <body = b (int64 i, bool ci, float[N,3] s) => (bool co, float[N,3] so)
            { co = Identity(ci) a = Add(u, v) c = Mul(a, x) d = Add(s, c) so = Add(d, v) }> }""",
        "open_batch",
    ),
    Case(
        "hoist-invariants",
        """g (float[N,3] x, float[S,M,3] keys, int64 n) => (float[T] y) <float[3,4] w, float[3,99] wide>
        { last, y = Loop (n, , x) <body = b (int64 i, bool ci, float[N,3] s) => (bool co, float[N,3] so, float o)
            { co = Identity(ci) k = MatMul(keys, w) v = MatMul(keys, wide) a = ReduceMax<keepdims=0>(k)
              c = ReduceMax<keepdims=0>(v) o = Add(a, c) so = Neg(s) }> }""",
        "wide_result_stays",
    ),
    Case(
        "hoist-invariants",
        """g (float[2] x, int64[2] k, int64[2] d, int64 n, float[2] u) => (float[2] y)
        { y = Loop (n, , x) <body = b (int64 i, bool ci, float[2] s) => (bool co, float[2] so)
            { co = Identity(ci) q = Div(k, d) f = Cast<to=1>(q) e = Exp(u) g = Add(s, f) so = Mul(g, e) }> }""",
        "division_stays",
    ),
    Case(
        "recurrent-loops",
        """g (float[T,B,3] x, float[B,2] h0) => (float[T,B,2] y, float[B,2] h) <float[3,2] w, float[2,2] r, float[2] c>
        { h, y = Scan <num_scan_inputs=1, body = b (float[B,2] s, float[B,3] xi) => (float[B,2] so, float[B,2] o)
            { p = MatMul(xi, w) q = Gemm(s, r, c) a = Add(p, q) so = Tanh(a) o = Identity(so) }> (h0, x) }""",
    ),
    no(
        "recurrent-loops",
        """g (float[T,B,3] x, float[A,2] h0) => (float[T,B,2] y) <float[3,2] w, float[2,2] r, float[2] c>
        { h, y = Scan <num_scan_inputs=1, body = b (float[B,2] s, float[B,3] xi) => (float[B,2] so, float[B,2] o)
            { p = MatMul(xi, w) q = Gemm(s, r, c) a = Add(p, q) so = Tanh(a) o = Identity(so) }> (h0, x) }""",
        "other_batch",
    ),
    no(
        "unroll-loops",
        """g (float[2] x, int64 n) => (float[2] y) <bool c = {1}>
        { y = Loop (n, c, x) <body = b (int64 i, bool ci, float[2] s) => (bool co, float[2] so)
            { co = Identity(ci) so = Neg(s) }> }""",
        "open_count",
    ),
    no(
        "unroll-loops",
        """g (float[2] x) => (float[2] y) <int64 n = {17}, bool c = {1}>
        { y = Loop (n, c, x) <body = b (int64 i, bool ci, float[2] s) => (bool co, float[2] so)
            { co = Identity(ci) so = Neg(s) }> }""",
        "too_many",
    ),
    no(
        "unroll-loops",
        """g (float[2] x) => (float[2] y) <int64 n = {3}, bool c = {1}, int64 two = {2}>
        { y = Loop (n, c, x) <body = b (int64 i, bool ci, float[2] s) => (bool co, float[2] so)
            { co = Less(i, two) so = Neg(s) }> }""",
        "own_condition",
    ),
    no(
        "unroll-loops",
        """g (float[2] x) => (float[2] y) <int64 n = {2}, bool c = {1}>
        { y = Loop (n, c, x) <body = b (int64 i, bool ci, float[2] s) => (bool co, float[2] so)
            { co = Identity(ci) so = Neg(s) }> }""",
        "switched_off",
        config={"ENABLE_LOOP_UNROLLING": "NO"},
    ),
]

_BN = "float[4] s, float[4] b, float[4] m, float[4] v"

LINEAR = [
    Case(
        "linear-affine",
        f"""g (float[1,3,5,5] x) => (float[1,4,5,5] y) <float[4,3,3,3] w, {_BN}>
        {{ a = Conv<pads=[1,1,1,1]>(x, w) y = BatchNormalization(a, s, b, m, v) }}""",
        "batch_norm",
    ),
    Case(
        "linear-affine",
        """g (float[1,4,3,3] x) => (float[1,6,5,5] y) <float[4,3,3,3] w, float[6] c, float[6,1,1] s, float[1,6,1,1] t>
        { a = ConvTranspose<group=2>(x, w, c) b = Mul(a, s) y = Sub(t, b) }""",
        "transposed_scale_shift",
    ),
    Case(
        "linear-affine",
        """g (float[2,3] x) => (float[2,4] y) <float[4,3] w, float[4] c, float[4] s, float[1,4] t>
        { a = Gemm<transB=1,alpha=0.5,beta=2.0>(x, w, c) b = Div(a, s) y = Add(b, t) }""",
        "gemm",
    ),
    Case(
        "linear-affine",
        "g (float[2,5,3] x) => (float[2,5,4] y) <float[3,4] w, float[4] s> { a = MatMul(x, w) y = Mul(a, s) }",
        "matmul",
    ),
    no(
        "linear-affine",
        "g (float[1,3,5,5] x) => (float[1,4,5,5] y) <float[4,3,1,1] w, float[5] s> { a = Conv(x, w) y = Mul(a, s) }",
        "per_column",
    ),
    no(
        "linear-affine",
        """g (float[1,3,5,5] x) => (float[1,4,5,5] y, float[1,4,5,5] a) <float[4,3,1,1] w, float[4,1,1] s>
        { a = Conv(x, w) y = Mul(a, s) }""",
        "used_twice",
    ),
    no(
        "linear-affine",
        "g (float[2,3] x) => (float[2,4] y) <float[3,4] w, float[4] t> { a = MatMul(x, w) y = Add(a, t) }",
        "no_bias",
    ),
    no(
        "linear-affine",
        "g (float[1,3,5,5] x, float[4] b) => (float[1,4,5,5] y) <float[4,3,1,1] w, float s = {2}> "
        "{ a = Conv(x, w, b) y = Mul(a, s) }",
        "computed_bias",
    ),
    Case(
        "affine-linear",
        """g (float[1,4,5,5] x) => (float[1,4,3,3] y) <float[4,2,3,3] w, float[4,1,1] m, float s = {4}>
        { a = Sub(x, m) b = Div(a, s) y = Conv<group=2>(b, w) }""",
        "mean_scale",
    ),
    Case(
        "affine-linear",
        """g (float[2,3] x) => (float[2,4] y) <float[3,4] w, float[4] c, float[3] t>
        { a = Add(x, t) y = Gemm<alpha=0.5>(a, w, c) }""",
        "gemm",
    ),
    Case(
        "affine-linear",
        """g (float[1,3,5,5] x) => (float[1,4,5,5] y) <float[4,3,3,3] w, float[1,3,1,1] s>
        { a = Mul(x, s) y = Conv<pads=[1,1,1,1]>(a, w) }""",
        "padded_scale",
    ),
    no(
        "affine-linear",
        """g (float[1,3,5,5] x) => (float[1,4,5,5] y) <float[4,3,3,3] w, float[1,3,1,1] m>
        { a = Sub(x, m) y = Conv<pads=[1,1,1,1]>(a, w) }""",
        "padded_shift",
    ),
    no(
        "affine-linear",
        """g (float[1,1,5,5] x) => (float[1,4,5,5] y) <float[4,3,1,1] w, float[1,3,1,1] s>
        { a = Mul(x, s) y = Conv(a, w) }""",
        "enlarged",
    ),
    Case(
        "batch-norm",
        f"g (float[2,4,3] x) => (float[2,4,3] y) <{_BN}> {{ a = BatchNormalization(x, s, b, m, v) y = Relu(a) }}",
    ),
    Case(
        "merge-scales",
        "g (float[2,3] x) => (float[2,3] y) <float p = {2}, float[3] q> { a = Mul(x, p) y = Mul(q, a) }",
    ),
    no("merge-scales", "g (float[2] x) => (float[2] y) <float p = {1e-30}> { a = Mul(x, p) y = Mul(a, p) }"),
    Case(
        "merge-shifts",
        "g (float[2,3] x) => (float[2,3] y) <float p = {2}, float[3] q> { a = Add(x, p) y = Add(q, a) }",
    ),
    no("merge-shifts", "g (float[2] x) => (float[2] y) <float p = {3e38}> { a = Add(x, p) y = Add(a, p) }"),
    no("batch-norm", f"g (float[] x) => (float[] y) <{_BN}> {{ y = BatchNormalization(x, s, b, m, v) }}"),
]
