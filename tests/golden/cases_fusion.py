"""Cases of recognition and fusion."""

from __future__ import annotations

from golden.cases import Case, no

_X = "g (float[2,3,8] x) => (float[2,3,8] y)"
_ERF = "a = Div(x, r) b = Erf(a) c = Add(b, o) d = Mul(x, c) y = Mul(d, h)"

_LSTM = "g (float[2,5] x, float[2,3] h, float[2,3] c) => (float[2,3] k, float[2,3] d)"
_LSTM_WEIGHTS = "<float[12,5] w, float[12] wb, float[12,3] r, float[12] rb>"
_LSTM_STEPS = """{ p = Gemm<transB=1>(x, w, wb) q = Gemm<transB=1>(h, r, rb) s = Add(p, q)
      i, f, g, o = Split<axis=1, num_outputs=4>(s)
      i1 = Sigmoid(i) f1 = Sigmoid(f) g1 = Tanh(g) o1 = Sigmoid(o)
      a = Mul(f1, c) b = Mul(i1, g1) d = Add(a, b) t = Tanh(d) k = Mul(o1, t) }"""
_GRU = "g (float[2,5] x, float[2,3] h) => (float[2,3] k)"
_GRU_STEPS = """<float[9,5] w, float[9] wb, float[9,3] r, float[9] rb, float one = {1}>
    { p = Gemm<transB=1>(x, w, wb) q = Gemm<transB=1>(h, r, rb)
      pr, pz, pn = Split<axis=1, num_outputs=3>(p) qr, qz, qn = Split<axis=-1, num_outputs=3>(q)
      sr = Add(pr, qr) rr = Sigmoid(sr) sz = Add(qz, pz) z = Sigmoid(sz)
      m = Mul(rr, qn) sn = Add(pn, m) n = Tanh(sn)"""

_HEADS = "g (float[2,5,32] q, float[2,6,32] k, float[2,6,12] v, float[5,6] mask)"
_HEAD_STEPS = """
{ q0 = Reshape(q, h) q1 = Transpose<perm=[0,2,1,3]>(q0) k0 = Reshape(k, h) k1 = Transpose<perm=[0,2,1,3]>(k0)
  v0 = Reshape(v, h) v1 = Transpose<perm=[0,2,1,3]>(v0) a = Attention(q1, k1, v1, mask)
  b = Transpose<perm=[0,2,1,3]>(a) y = Reshape(b, o) }"""

RECOGNISE = [
    Case("gelu", f"{_X} <float r = {{1.4142135}}, float o = {{1}}, float h = {{0.5}}> {{ {_ERF} }}"),
    Case(
        "gelu",
        f"""{_X} <float[1] r = {{0.70710678}}, float o = {{1}}, float h = {{0.5}}>
        {{ a = Mul(r, x) b = Erf(a) c = Add(o, b) d = Mul(c, h) y = Mul(d, x) }}""",
        "other_order",
    ),
    no(
        "gelu",
        f"g (float[] x) => (float[] y) <float r = {{1.4142135}}, float o = {{1}}, float h = {{0.5}}> {{ {_ERF} }}",
    ),
    Case(
        "gelu-tanh",
        f"""{_X} <float c = {{0.7978845608}}, float k = {{0.044715}}, float one = {{1}}, float half = {{0.5}}>
        {{ h = Mul(x, half) a = Mul(x, c) b = Mul(x, k) d = Mul(b, x) e = Add(d, one) f = Mul(a, e) t = Tanh(f)
          g = Add(t, one) y = Mul(h, g) }}""",
        "bloom",
    ),
    Case(
        "gelu-tanh",
        f"""{_X} <float three = {{3}}, float k = {{0.044715}}, float r = {{0.7978845608}}, float o = {{1}}, float h =
          {{0.5}}>
        {{ a = Pow(x, three) b = Mul(a, k) c = Add(x, b) d = Mul(c, r) e = Tanh(d) f = Add(e, o) i = Mul(x, f) y =
          Mul(i, h) }}""",
    ),
    Case(
        "gelu-tanh",
        f"""{_X} <float k = {{0.044715}}, float r = {{0.7978845608}}, float o = {{1}}, float h = {{0.5}}>
        {{ a = Mul(k, x) b = Mul(x, a) p = Mul(x, b) c = Add(x, p) d = Mul(r, c) e = Tanh(d) f = Add(o, e)
          i = Mul(h, f) y = Mul(x, i) }}""",
        "powers",
    ),
    no(
        "gelu-tanh",
        """g (float[2,3] x) => (float[2,3] y, float[2,3] e)
        <float three = {3}, float k = {0.044715}, float r = {0.7978845608}, float o = {1}, float h = {0.5}>
        { a = Pow(x, three) b = Mul(a, k) c = Add(x, b) d = Mul(c, r) e = Tanh(d) f = Add(e, o) i = Mul(x, f) y =
          Mul(i, h) }""",
    ),
    Case(
        "one-hot-product",
        """g (int32[2,3,1] x) => (float[2,3,2] y) <int32[1,1,4] n = {0,1,2,3}, float[4,2] w>
        { a = Equal(x, n) b = Cast<to=1>(a) y = MatMul(b, w) }""",
    ),
    no(
        "one-hot-product",
        """g (int32[2,3] x) => (float[2,2] y) <int32[1,3] n = {0,1,2}, float[3,2] w>
        { a = Equal(x, n) b = Cast<to=1>(a) y = MatMul(b, w) }""",
        "several",
    ),
    no(
        "one-hot-product",
        """g (float[3,1] x) => (float[3,2] y) <float[1,4] f = {0,1,2,3}, int32[1,4] n = {0,1,2,3}, float[4,2] w>
        { i = Floor(x) u = Cast<to=13>(i) v = Cast<to=13>(n) a = Equal(u, v) b = Cast<to=1>(a) y = MatMul(b, w) }""",
        "type",
        first="propagate",
    ),
    Case(
        "computed-table",
        """g (int64[2,3] x) => (float[2,3,2] y) <float[4,2] t, float[1,1,2] b>
        { a = Gather(t, x) y = Sub(b, a) }""",
    ),
    Case("computed-table", "g (int64[3] x) => (float[3,2] y) <float[4,2] t> { a = Gather(t, x) y = Tanh(a) }", "alone"),
    no(
        "computed-table",
        "g (int64[3] x) => (float[3,2] y) <float[4,2] t, float[3,1] b> { a = Gather(t, x) y = Add(a, b) }",
    ),
    Case("swish", f"{_X} {{ a = Sigmoid(x) y = Mul(x, a) }}"),
    Case("swish", f"{_X} <float k = {{1.702}}> {{ b = Mul(x, k) a = Sigmoid(b) y = Mul(a, x) }}", "quick_gelu"),
    no("swish", "g (float[2] x) => (float[2] y, float[2] a) { a = Sigmoid(x) y = Mul(x, a) }"),
    Case(
        "hard-sigmoid",
        f"{_X} <float t = {{3}}, float z = {{0}}, float s = {{6}}> {{ a = Add(x, t) b = Clip(a, z, s) y = Div(b, s) }}",
    ),
    no(
        "hard-sigmoid",
        "g (float[2] x) => (float[2] y, float[2] b) <float t = {3}, float z = {0}, float s = {6}> "
        "{ a = Add(x, t) b = Clip(a, z, s) y = Div(b, s) }",
    ),
    Case("hard-swish", f"{_X} {{ a = HardSigmoid<alpha=0.16666667, beta=0.5>(x) y = Mul(x, a) }}"),
    Case(
        "hard-swish",
        f"""{_X} <float t = {{3}}, float z = {{0}}, float s = {{6}}>
        {{ a = Add(x, t) b = Clip(a, z, s) c = Mul(x, b) y = Div(c, s) }}""",
        "decomposed",
    ),
    no(
        "hard-swish",
        "g (float[2] x) => (float[2] y, float[2] a) { a = HardSigmoid<alpha=0.16666667>(x) y = Mul(x, a) }",
    ),
    Case("softplus", f"{_X} <float o = {{1}}> {{ a = Exp(x) b = Add(a, o) y = Log(b) }}"),
    no(
        "softplus",
        "g (float[2] x) => (float[2] y, float[2] a) <float o = {1}> { a = Exp(x) b = Add(a, o) y = Log(b) }",
    ),
    Case("mish", f"{_X} {{ a = Softplus(x) b = Tanh(a) y = Mul(x, b) }}"),
    no("mish", "g (float[2] x) => (float[2] y, float[2] b) { a = Softplus(x) b = Tanh(a) y = Mul(x, b) }"),
    Case(
        "layer-norm",
        f"""{_X} <int64[1] k = {{-1}}, float two = {{2}}, float e = {{1e-5}}>
        {{ m = ReduceMean(x, k) c = Sub(x, m) p = Pow(c, two) v = ReduceMean(p, k) w = Add(v, e) d = Sqrt(w) y =
          Div(c, d) }}""",
    ),
    Case(
        "layer-norm",
        f"""{_X} <int64[2] k = {{1,2}}, float e = {{1e-6}}>
        {{ m = ReduceMean(x, k) c = Sub(x, m) p = Mul(c, c) v = ReduceMean(p, k) w = Add(v, e) d = Sqrt(w) r =
          Reciprocal(d)
           y = Mul(c, r) }}""",
        "two_axes",
    ),
    no(
        "layer-norm",
        f"""{_X} <int64[1] k = {{1}}, float two = {{2}}, float e = {{1e-5}}>
        {{ m = ReduceMean(x, k) c = Sub(x, m) p = Pow(c, two) v = ReduceMean(p, k) w = Add(v, e) d = Sqrt(w) y =
          Div(c, d) }}""",
        "inner_axis",
    ),
    no(
        "layer-norm",
        """g (float[2,D] x) => (float[2,D] y) <int64[1] k = {1}, float two = {2}, float e = {1e-5}>
        { m = ReduceMean(x, k) c = Sub(x, m) p = Pow(c, two) v = ReduceMean(p, k) w = Add(v, e) d = Sqrt(w) y =
          Div(c, d) }""",
        "open_size",
    ),
    Case(
        "rms-norm",
        f"""{_X} <int64[1] k = {{2}}, float two = {{2}}, float n = {{-0.5}}, float e = {{1e-6}}>
        {{ p = Pow(x, two) v = ReduceMean(p, k) w = Add(v, e) r = Pow(w, n) y = Mul(x, r) }}""",
    ),
    no(
        "rms-norm",
        f"""{_X} <int64[1] k = {{0}}, float e = {{1e-6}}>
        {{ p = Mul(x, x) v = ReduceMean(p, k) w = Add(v, e) r = Sqrt(w) y = Div(x, r) }}""",
    ),
    Case(
        "norm-scale",
        f"{_X} <float[8] o = {{1,1,1,1,1,1,1,1}}, float[8] s> {{ a = RMSNormalization(x, o) y = Mul(s, a) }}",
    ),
    no(
        "norm-scale",
        f"{_X} <float[8] o = {{1,1,1,1,1,1,1,1}}, float[3,1] s> {{ a = LayerNormalization(x, o) y = Mul(a, s) }}",
    ),
    Case("norm-bias", f"{_X} <float[8] s, float[1,1,8] b> {{ a = LayerNormalization(x, s) y = Add(a, b) }}"),
    no("norm-bias", f"{_X} <float[8] s, float[2,1,1] b> {{ a = LayerNormalization(x, s) y = Add(a, b) }}"),
    Case(
        "group-norm",
        """g (float[2,6,2,2] x) => (float[2,6,2,2] y)
        <int64[3] s = {2,3,8}, int64[4] t = {2,6,2,2}, float[3] o = {1,1,1}, float[3] z = {0,0,0}>
        { a = Reshape(x, s) b = InstanceNormalization(a, o, z) y = Reshape(b, t) }""",
    ),
    no(
        "group-norm",
        """g (float[2,6,2,2] x) => (float[2,6,2,2] y)
        <int64[3] s = {2,3,8}, int64[4] t = {2,6,2,2}, float[3] o, float[3] z = {0,0,0}>
        { a = Reshape(x, s) b = InstanceNormalization(a, o, z) y = Reshape(b, t) }""",
    ),
    Case(
        "group-norm-affine",
        """g (float[2,4,3] x) => (float[2,4,3] y) <float[4] o = {1,1,1,1}, float[4] z = {0,0,0,0}, float[4,1] s,
          float[4,1] b>
        { a = GroupNormalization<num_groups=2>(x, o, z) c = Mul(a, s) y = Add(c, b) }""",
    ),
    no(
        "group-norm-affine",
        """g (float[2,4,3] x) => (float[2,4,3] y) <float[4] o = {1,1,1,1}, float[4] z = {0,0,0,0}, float[3] s>
        { a = GroupNormalization<num_groups=2>(x, o, z) y = Mul(a, s) }""",
    ),
    Case(
        "softmax",
        f"""{_X} <int64[1] k = {{1}}>
        {{ m = ReduceMax(x, k) c = Sub(x, m) e = Exp(c) s = ReduceSum(e, k) y = Div(e, s) }}""",
    ),
    no("softmax", f"{_X} <int64[2] k = {{1,2}}> {{ e = Exp(x) s = ReduceSum(e, k) y = Div(e, s) }}"),
    Case(
        "attention",
        """g (float[2,4,5,8] q, float[2,4,6,8] k, float[2,4,6,3] v, float[5,6] mask) => (float[2,4,5,3] y) <float r =
          {2.5}>
        { t = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, t) d = Div(s, r) e = Add(d, mask) p = Softmax(e) y =
          MatMul(p, v) }""",
    ),
    Case(
        "attention",
        """g (float[6,5,8] q, float[6,8,5] t, float[6,5,8] v) => (float[6,5,8] y) <float r = {0.6}>
        { a = Mul(q, r) b = Mul(t, r) s = MatMul(a, b) p = Softmax(s) y = MatMul(p, v) }""",
        "one_head",
    ),
    Case(
        "attention",
        """g (float[2,2,2,8] q, float[2,2,8,3] t, float[2,2,3,3] v) => (float[2,2,2,3] y)
        <bool[2,3] seen = {1,0,0,1,1,0}, float low = {-70000}>
        { s = MatMul(q, t) e = Where(seen, s, low) p = Softmax(e) y = MatMul(p, v) }""",
        "where_seen",
    ),
    Case(
        "attention",
        """g (float[2,2,2,8] q, float[2,2,8,3] t, float[2,2,3,3] v) => (float[2,2,2,3] y)
        <bool[1,1,2,3] hidden = {0,1,1,0,0,1}, float low = {-70000}>
        { s = MatMul(q, t) e = Where(hidden, low, s) p = Softmax(e) y = MatMul(p, v) }""",
        "where_hidden",
    ),
    Case(
        "attention",
        """g (float[2,2,2,8] q, float[2,2,8,3] t, float[2,2,3,3] v) => (float[2,2,2,3] y)
        <bool[2,3] seen = {1,0,0,0,0,0}, float low = {-70000}>
        { s = MatMul(q, t) e = Where(seen, s, low) p = Softmax(e) y = MatMul(p, v) }""",
        "where_nothing_is_seen",
    ),
    Case(
        "attention",
        """g (float[2,4,5,8] q, float[2,4,8,6] t, float[2,4,6,3] v, float[2,1,5,1] mask) => (float[2,4,5,3] y)
        { s = MatMul(q, t) e = Add(s, mask) p = Softmax(e) y = MatMul(p, v) }""",
        "short_mask",
    ),
    Case(
        "attention",
        """g (float[2,4,5,8] q, float[2,4,8,6] t, float[2,4,6,3] v, bool[2,1,5,6] seen) => (float[2,4,5,3] y)
        <float r = {0.6}, float zero = {0}, float low = {-inf}>
        { a = Mul(q, r) b = Mul(t, r) m = Where(seen, zero, low) s = MatMul(a, b) e = Add(s, m) w = Softmax(e)
          n = IsNaN(w) p = Where(n, zero, w) y = MatMul(p, v) }""",
        "guarded",
    ),
    Case(
        "attention",
        """g (float[2,4,5,8] q, float[2,4,8,6] t, float[2,4,6,3] v, bool[2,1,5,6] seen) => (float[2,4,5,3] y)
        <float low = {-inf}> { s = MatMul(q, t) e = Where(seen, s, low) p = Softmax(e) y = MatMul(p, v) }""",
        "unguarded",
    ),
    Case(
        "attention",
        """g (float[2,4,5,8] q, float[2,4,8,6] t, float[2,4,6,3] v, bool[2,1,1,6] hidden) => (float[2,4,5,3] y)
        <float zero = {0}, float low = {-3.4028234663852886e+38}>
        { s = MatMul(q, t) e = Where(hidden, low, s) w = Softmax(e) p = Where(hidden, zero, w) y = MatMul(p, v) }""",
        "weights_hidden",
    ),
    Case(
        "attention",
        """g (float[2,4,5,8] q, float[2,4,8,6] t, float[2,4,6,3] v, float[2,1,5,6] m) => (float[2,4,5,3] y)
        <float c = {3}, float r = {0.5}>
        { s = MatMul(q, t) a = Mul(s, r) d = Div(a, c) h = Tanh(d) e = Mul(h, c) f = Add(e, m) p = Softmax(f)
          y = MatMul(p, v) }""",
        "capped",
    ),
    Case(
        "attention",
        """g (float[8,5,8] q, float[8,8,6] t, float[8,6,3] v, float[8,1,6] bias, float[2,1,5,6] m) => (float[8,5,3] y)
        <int64[4] apart = {2,4,5,6}, int64[3] together = {8,5,6}>
        { s = MatMul(q, t) a = Add(s, bias) b = Reshape(a, apart) c = Add(b, m) w = Softmax(c)
          p = Reshape(w, together) y = MatMul(p, v) }""",
        "heads_in_batch",
    ),
    Case(
        "attention",
        """g (float[2,4,5,8] q, float[2,4,8,6] t, float[2,4,6,3] v, double[5,6] m) => (float[2,4,5,3] y)
        { s = MatMul(q, t) a = Cast<to=11>(s) b = Sub(a, m) w = Softmax(b) p = Cast<to=1>(w) y = MatMul(p, v) }""",
        "wider",
    ),
    no(
        "attention",
        """g (float[2,4,5,8] q, float[2,4,8,6] t, float[2,4,6,3] v) => (float[2,4,5,3] y, float[2,4,5,6] p)
        { s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }""",
        "weights_shown",
    ),
    no(
        "attention",
        """g (float[2,4,5,8] q, float[2,4,8,6] t, float[2,4,6,3] v) => (float[2,4,5,3] y)
        { s = MatMul(q, t) a = Cast<to=10>(s) w = Softmax(a) p = Cast<to=1>(w) y = MatMul(p, v) }""",
        "rounded",
    ),
    Case(
        "einsum",
        """g (float[5,2,4,3] q, float[6,2,4,3] k) => (float[2,4,5,6] y)
        { y = Einsum<equation="ibnd,jbnd->bnij">(q, k) }""",
    ),
    Case(
        "einsum",
        """g (float[5,2,8] x) => (float[5,2,4,3] y) <float[4,3,8] w>
        { y = Einsum<equation="ibh,ndh->ibnd">(x, w) }""",
        "weights",
    ),
    no(
        "einsum",
        """g (float[5,N,M] x, float[6,N,M] z) => (float[5,6] y) { y = Einsum<equation="ijk,ljk->il">(x, z) }""",
        "open_sizes",
    ),
    Case(
        "attention-groups",
        """g (float[2,4,5,8] q, float[2,2,6,8] k, float[2,2,6,3] v) => (float[2,4,5,3] y)
        <int64[1] two = {2}, int64[5] kd = {2,2,2,6,8}, int64[5] vd = {2,2,2,6,3}, int64[4] kr = {2,4,6,8},
         int64[4] vr = {2,4,6,3}>
        { a = Unsqueeze(k, two) b = Expand(a, kd) c = Reshape(b, kr) d = Unsqueeze(v, two) e = Expand(d, vd)
          f = Reshape(e, vr) y = Attention(q, c, f) }""",
    ),
    no(
        "attention-groups",
        """g (float[2,4,5,8] q, float[2,2,6,8] k, float[2,2,6,3] v) => (float[2,4,5,3] y)
        <int64[1] one = {1}, int64[5] kd = {2,2,2,6,8}, int64[5] vd = {2,2,2,6,3}, int64[4] kr = {2,4,6,8},
         int64[4] vr = {2,4,6,3}>
        { a = Unsqueeze(k, one) b = Expand(a, kd) c = Reshape(b, kr) d = Unsqueeze(v, one) e = Expand(d, vd)
          f = Reshape(e, vr) y = Attention(q, c, f) }""",
    ),
    Case(
        "transpose-apart",
        """g (float[2,4,5,3] x) => (float[2,4,3,5] y) <int64[3] a = {8,5,3}, int64[4] b = {2,4,3,5}>
        { c = Reshape(x, a) d = Transpose<perm=[0,2,1]>(c) y = Reshape(d, b) }""",
    ),
    Case(
        "transpose-apart",
        """g (float[2,2,2,5,3] x) => (float[2,4,3,5] y) <int64[3] a = {8,5,3}, int64[4] b = {2,4,3,5}>
        { c = Reshape(x, a) d = Transpose<perm=[0,2,1]>(c) y = Reshape(d, b) }""",
        "other_rank",
    ),
    no(
        "transpose-apart",
        """g (float[2,4,5,3] x) => (float[2,4,5,3] y) <int64[3] a = {8,5,3}, int64[4] b = {2,4,5,3}>
        { c = Reshape(x, a) d = Transpose<perm=[0,2,1]>(c) y = Reshape(d, b) }""",
    ),
    Case(
        "rotary",
        """g (float[2,3,5,4] x, float[1,5,2] angles) => (float[2,3,5,4] y)
        <int64[1] zero = {0}, int64[1] two = {2}, int64[1] end = {9223372036854775807}, int64[1] last = {3},
         int64[1] one = {1}>
        { a = Concat<axis=-1>(angles, angles) b = Unsqueeze(a, one) c = Cos(b) s = Sin(b) f = Slice(x, zero, two, last)
          g = Slice(x, two, end, last) n = Neg(g) t = Concat<axis=-1>(n, f) l = Mul(x, c) r = Mul(t, s)
          y = Add(l, r) }""",
    ),
    no(
        "rotary",
        """g (float[2,3,5,4] x, float[1,1,5,4] c, float[1,1,5,4] s) => (float[2,3,5,4] y)
        <int64[1] zero = {0}, int64[1] two = {2}, int64[1] end = {9}, int64[1] last = {3}>
        { f = Slice(x, zero, two, last) g = Slice(x, two, end, last) n = Neg(g) t = Concat<axis=-1>(n, f) l = Mul(x, c)
          r = Mul(t, s) y = Add(l, r) }""",
    ),
    Case(
        "turned-weights",
        """g (float[2,4,8] x) => (float[2,4,6] y) <float[6,8] w>
        { t = Transpose<perm=[1,0]>(w) y = MatMul(x, t) }""",
    ),
    Case(
        "turned-weights",
        """g (float[4,8] x) => (float[4,6] y) <float[6,8] w, float[6] b>
        { t = Transpose(w) y = Gemm<alpha=0.5>(x, t, b) }""",
        "gemm",
    ),
    Case(
        "norm-casts",
        """g (float16[2,4,8] x) => (float16[2,4,8] y) <float[8] s>
        { a = Cast<to=1>(x) b = RMSNormalization(a, s) y = Cast<to=10>(b) }""",
    ),
    Case(
        "norm-casts",
        """g (float16[2,4,8] x) => (float16[2,4,8] y) <float[4] s, float[4] b>
        { a = Cast<to=1>(x) c = GroupNormalization<num_groups=2>(a, s, b) y = Cast<to=10>(c) }""",
        "groups",
    ),
    no(
        "norm-casts",
        """g (float16[2,4,8] x) => (float16[2,4,8] y) <float[8] s = {0.1,1,1,1,1,1,1,1}>
        { a = Cast<to=1>(x) b = RMSNormalization(a, s) y = Cast<to=10>(b) }""",
    ),
    no(
        "attention",
        """g (float[2,4,5,8] q, float[8,6] t, float[2,4,6,3] v) => (float[2,4,5,3] y)
        { s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }""",
        "ranks",
    ),
    Case(
        "attention-scale",
        """g (float[2,4,5,8] q, float[2,4,8,6] t, float[2,4,6,3] v, float[5,6] m) => (float[2,4,5,3] y)
        <float r = {0.6}, float[1] d = {2}>
        { a = Mul(q, r) b = Mul(d, t) k = Transpose<perm=[0,1,3,2]>(b) y = Attention<scale=0.5>(a, k, v, m) }""",
    ),
    no(
        "attention-scale",
        """g (float[2,4,5,8] q, float[2,4,6,8] k, float[2,4,6,3] v) => (float[2,4,5,3] y) <float r = {0.6}>
        { a = Mul(q, r) y = Attention(a, k, v) }""",
    ),
    Case(
        "attention-heads",
        f"{_HEADS} => (float[2,5,12] y) <int64[4] h = {{0,0,4,-1}}, int64[3] o = {{0,0,12}}> {_HEAD_STEPS}",
    ),
    no(
        "attention-heads",
        f"{_HEADS} => (float[2,20,3] y) <int64[4] h = {{0,0,4,-1}}, int64[3] o = {{0,20,3}}> {_HEAD_STEPS}",
    ),
    Case(
        "scores-apart",
        """g (float[2,4,5,8] q, float[2,4,8,6] t, float[2,4,6,3] v) => (float[2,4,5,3] y) <float r = {2.5}>
        { s = MatMul(q, t) d = Div(s, r) p = Softmax(d) y = MatMul(p, v) }""",
        first="fully-connected-activation",
    ),
    Case(
        "scores-apart",
        """g (float[2,4,5,8] q, float[2,4,8,6] t, float[2,4,6,3] v, float[5,6] m) => (float[2,4,5,3] y)
        <float r = {2.5}> { s = MatMul(q, t) d = Mul(s, r) e = Add(d, m) p = Softmax(e) y = MatMul(p, v) }""",
        "mask",
        first="fully-connected-activation",
    ),
    Case("lstm-cell", f"{_LSTM} {_LSTM_WEIGHTS} {_LSTM_STEPS}"),
    no("lstm-cell", f"{_LSTM} {_LSTM_WEIGHTS.replace('[12] wb', '[1] wb')} {_LSTM_STEPS}"),
    Case("gru-cell", f"{_GRU} {_GRU_STEPS} d = Sub(h, n) e = Mul(d, z) k = Add(e, n) }}"),
    Case(
        "gru-cell",
        f"{_GRU} {_GRU_STEPS} d = Sub(one, z) e = Mul(d, n) f = Mul(z, h) k = Add(e, f) }}",
        "two_products",
    ),
    no(
        "gru-cell",
        f"{_GRU.replace('k)', 'k, float[2,3] n)')} {_GRU_STEPS} d = Sub(h, n) e = Mul(d, z) k = Add(e, n) }}",
    ),
]

_FQ = "float il = {-1}, float ih = {1}, float ol = {-2}, float oh = {2}"
_CONV = "float[1,3,6,6] x) => (float[1,4,4,4] y) <float[4,3,3,3] w"

FUSE = [
    Case(
        "convolution-simple",
        f"""g ({_CONV}, float[4,1,1] s, float[4,1,1] t, float[4,1,1] p, float lo = {{0}}, float hi = {{6}}, {_FQ}>
        {{ a = Conv(x, w) b = Mul(a, s) c = PRelu(b, p) d = Add(t, c) e = Clip(d, lo, hi) f = Elu<alpha=0.5>(e)
           y = org.openvinotoolkit.FakeQuantize<levels=16>(f, il, ih, ol, oh) }}""",
    ),
    Case("convolution-simple", f"g ({_CONV}> {{ a = Conv(x, w) b = Sigmoid(a) y = Mul(a, b) }}", "diamond"),
    no("convolution-simple", f"g ({_CONV}, float[4] s> {{ a = Conv(x, w) y = Mul(a, s) }}", "per_column"),
    no(
        "convolution-simple",
        f"g ({_CONV}, float[2,1,1,1] s> {{ a = Conv(x, w) b = Mul(a, s) c = ReduceSum<keepdims=1>(b) y = Add(a, c) }}",
        "enlarges",
    ),
    Case(
        "convolution-sum",
        """g (float[1,3,6,6] x, float[1,4,4,4] r) => (float[1,4,4,4] y) <float[4,3,3,3] w>
        { a = Conv(x, w) b = Add(a, r) y = Relu(b) }""",
    ),
    Case(
        "convolution-sum",
        """g (float[1,3,6,6] x) => (float[1,4,4,4] y) <float[4,3,3,3] w, float[4,3,3,3] v>
        { a = Conv(x, w) b = Conv(x, v) c = Add(a, b) y = Relu(c) }""",
        "later_takes_it",
    ),
    no(
        "convolution-sum",
        """g (float[1,3,6,6] x, float[1,4,1,4] r) => (float[1,4,4,4] y) <float[4,3,3,3] w>
        { a = Conv(x, w) y = Add(a, r) }""",
        "broadcast",
    ),
    no(
        "convolution-sum",
        """g (float[1,3,6,6] x, float[N,4,4,4] r) => (float[N,4,4,4] y) <float[4,3,3,3] w>
        { a = Conv(x, w) y = Add(a, r) }""",
        "open_batch",
    ),
    Case(
        "convolution-sum",
        """g (uint8[1,3,6,6] x, uint8 xz, int32[1,4,1,1] b, float s) => (float[1,4,4,4] y)
        <uint8[4,3,3,3] w, uint8 wz = {1}>
        { a = ConvInteger(x, w, xz, wz) c = Add(a, b) d = Cast<to=1>(c) e = Mul(d, s) f = Sigmoid(e) y = Mul(e, f) }""",
        "integer",
    ),
    no(
        "convolution-sum",
        """g (uint8[1,3,6,6] x, int32[1,4,4,1] b) => (int32[1,4,4,4] y) <uint8[4,3,3,3] w>
        { a = ConvInteger(x, w) y = Add(a, b) }""",
        "integer_broadcast",
    ),
    Case(
        "pooling-fakequantize",
        f"""g (float[1,3,6,6] x) => (float[1,3,3,3] y) <{_FQ}>
        {{ a = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)
           y = org.openvinotoolkit.FakeQuantize<levels=256>(a, il, ih, ol, oh) }}""",
    ),
    no(
        "pooling-fakequantize",
        """g (float[1,3,6,6] x) => (float[1,3,1,6] y) <float[6] il, float ih = {4}, float ol = {-2}, float oh = {2}>
        { a = AveragePool<kernel_shape=[6,1]>(x) y = org.openvinotoolkit.FakeQuantize<levels=256>(a, il, ih, ol, oh)
          }""",
    ),
    Case(
        "fully-connected-activation",
        "g (float[2,3] x) => (float[2,4] y) <float[3,4] w, float[4] b> { a = Gemm(x, w, b) y = Tanh(a) }",
    ),
    Case(
        "fully-connected-activation",
        """g (float[N,5,3] x, float[N,5,4] r) => (float[N,5,4] y) <float[3,4] w, float[4] b>
        { a = MatMul(x, w) c = Add(a, b) d = Gelu(c) y = Add(d, r) }""",
        "matmul_bias_residual",
    ),
    Case(
        "fully-connected-activation",
        """g (uint8[N,3] x, uint8 xz, float s) => (float[N,4] y) <int8[3,4] w, float[4] b>
        { a = MatMulInteger(x, w, xz) c = Cast<to=1>(a) d = Mul(c, s) y = Add(d, b) }""",
        "integer",
    ),
    Case(
        "fully-connected-activation",
        """g (uint8[2,3] x, float xs, float[2,4] r) => (float[2,4] y) <int8[3,4] w, float ws = {0.5}>
        { a = com.microsoft.MatMulIntegerToFloat(x, w, xs, ws) b = Relu(a) y = Add(b, r) }""",
        "integer_to_float",
    ),
    Case(
        "fully-connected-activation",
        """g (float[2,3] x) => (float[2,4] y) <uint8[3,4] w, float[4] ws, float[4] b>
        { a = com.microsoft.DynamicQuantizeMatMul(x, w, ws) c = Add(a, b) y = Gelu(c) }""",
        "dynamic_quantize",
    ),
    no(
        "fully-connected-activation",
        """g (uint8[4,3] x, float[4,1] s) => (float[4,4] y) <int8[3,4] w>
        { a = MatMulInteger(x, w) c = Cast<to=1>(a) y = Mul(c, s) }""",
        "scale_per_row",
    ),
    no(
        "fully-connected-activation",
        "g (float[4,3] x, float[4,1] r) => (float[4,4] y) <float[3,4] w> { a = MatMul(x, w) y = Add(a, r) }",
    ),
    Case(
        "gather-simple",
        """g (int64[2,3] i) => (float[2,3,4] y) <float[9,4] table, float[3,4] places, float[4] kind>
        { a = Gather(table, i) b = Add(a, places) y = Add(kind, b) }""",
    ),
    no(
        "gather-simple",
        """g (int64[N,3] i) => (float[N,3,4] y) <float[9,4] table, float[3,4] places>
        { a = Gather(table, i) y = Add(a, places) }""",
        "open",
    ),
    Case(
        "gather-one",
        "g (float[1,3,4] x) => (float[1,4] y) <int64 i = {-2}> { a = Relu(x) b = Gather<axis=1>(a, i) y = Tanh(b) }",
    ),
    no(
        "gather-one",
        "g (float[2,3,4] x) => (float[2,4] y) <int64 i = {1}> { a = Relu(x) b = Gather<axis=1>(a, i) y = Tanh(b) }",
        "pieces",
    ),
    Case(
        "normalisation-simple",
        """g (float[2,4,3,3] x) => (float[2,4,3,3] y) <float[4] s, float[4] b>
        { a = GroupNormalization<num_groups=2>(x, s, b) y = Swish(a) }""",
    ),
    no(
        "normalisation-simple",
        """g (float[2,3,4] x, float[2,3,4] z) => (float[2,3,4] y, float[2,3,4] a) <float[4] s>
        { a = RMSNormalization(x, s) y = Add(a, z) }""",
        "read",
    ),
    Case(
        "element-wise",
        """g (float[2,3] x, float[3] z, float[2,3] u) => (float[2,3] y)
        { a = Add(x, z) b = Exp(a) c = Neg(a) d = Mul(b, c) y = Sub(d, u) }""",
    ),
    no(
        "element-wise",
        "g (float[3] x, float[2,3] z) => (float[2,3] y) { a = Exp(x) y = Add(a, z) }",
        "enlarges",
    ),
    no(
        "element-wise",
        "g (float[4] x) => (float[4] y) { a = Exp(x) b = Neg(a) c = Softmax(a) y = Add(b, c) }",
        "read_twice",
    ),
    no("element-wise", "g (int64[3] x, int64[3] z) => (int64[3] y) { a = Add(x, z) y = Mul(a, z) }", "shapes"),
    Case(
        "group-convolutions",
        """g (float[1,4,5,5] x) => (float[1,6,3,3] y) <float[3,2,3,3] w, float[3,2,3,3] v, float[3] b, float[3] c>
        { p, q = Split<axis=1, num_outputs=2>(x) r = Conv(p, w, b) s = Conv(q, v, c) y = Concat<axis=1>(r, s) }""",
    ),
    no(
        "group-convolutions",
        """g (float[1,4,5,5] x) => (float[1,6,5,5] y) <float[3,2,3,3] w, float[3,2,1,1] v>
        { p, q = Split<axis=1, num_outputs=2>(x) r = Conv<pads=[1,1,1,1]>(p, w) s = Conv(q, v) y = Concat<axis=1>(r,
          s) }""",
        "parameters",
    ),
    no(
        "group-convolutions",
        """g (float[1,4,5,5] x) => (float[1,6,5,5] y) <float[3,2,1,1] w, float[3,2,1,1] v>
        { p, q = Split<axis=1, num_outputs=2>(x) r = Conv(p, w) s = Conv(q, v) y = Concat<axis=1>(s, r) }""",
        "order",
    ),
    Case(
        "channel-shuffle",
        """g (float[2,6,3,5] x) => (float[2,6,3,5] y)
        <int64[5] i = {2, 3, 2, 3, 5}, int64[4] j = {2, 6, 3, 5}>
        { a = Reshape(x, i) b = Transpose<perm=[0,2,1,3,4]>(a) y = Reshape(b, j) }""",
    ),
    no(
        "channel-shuffle",
        """g (float[2,6,3,5] x) => (float[2,6,5,3] y)
        <int64[5] i = {2, 3, 2, 3, 5}, int64[4] j = {2, 6, 5, 3}>
        { a = Reshape(x, i) b = Transpose<perm=[0,2,1,3,4]>(a) y = Reshape(b, j) }""",
        "another_shape",
    ),
]
