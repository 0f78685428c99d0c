"""Small ONNX models with open sizes, as text: what exporters rarely write. `zoo_shapes.py` checks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx
import onnx.parser


@dataclass(frozen=True)
class Text:
    """A model, the values that its open sizes take, and the greatest integers of its inputs."""

    body: str
    sizes: dict[str, Sequence[int]]
    high: dict[str, int] = field(default_factory=dict)
    #: of inputs for which the model says something else
    dims: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    opset: int = 18

    def model(self) -> onnx.ModelProto:
        text = f'<ir_version: 9, opset_import: ["": {self.opset}]> g {self.body}'
        model = onnx.parser.parse_model(text)
        for value in model.graph.output:  # the text says that they are scalars
            value.type.tensor_type.ClearField("shape")
        return model


N, BATCH = (*range(20), 33, 64), (0, 1, 2, 3, 5)
ROWS = {"b": BATCH, "n": N}
SOME = {"b": (1, 2, 3, 5), "n": (*range(1, 20), 33, 64)}

TEXTS = {
    "range": Text(
        """(float[b,n,4] x) => (float y) <int64 zero = {0}, int64 one = {1}, int64[1] last = {-1}> {
        n = Shape<start = 1, end = 2>(x)  k = Squeeze(n)  at = Range(zero, k, one)  back = Sub(k, at)
        f = Cast<to = 1>(back)  g = Unsqueeze(f, last)  y = Mul(x, g) }""",
        ROWS,
    ),
    "tile": Text(
        """(float[b,n,4] x) => (float y) <int64[1] one = {1}, int64[1] zero = {0}> {
        n = Shape<start = 1, end = 2>(x)  b = Shape<start = 0, end = 1>(x)
        times = Concat<axis = 0>(one, b, one)  t = Tile(x, times)  four = Constant<value_ints = [4]>()
        all = Concat<axis = 0>(b, n, four)  half = Expand(x, all)  y = Concat<axis = 1>(t, half)
        }""",
        SOME,
    ),
    "constant-of-shape": Text(
        """(float[b,n] x) => (float y, int64 z) <int64[2] up = {1, 0}, int64[1] two = {2}> {
        s = Shape(x)  more = Add(s, up)  c = ConstantOfShape<value = float[1] {0.5}>(more)
        z0 = Constant<value_ints = [0, 1]>()  d = Slice(c, up, more, z0)  w = Mul(d, x)  y = Concat<axis = 0>(c, w)
        m = Mul(s, two)  k = ReduceProd<keepdims = 0>(m)  z = Add(k, s) }""",
        ROWS,
    ),
    "trilu": Text(
        """(float[b,n,n] x) => (float y) <int64 two = {2}, int64[1] one = {1}> {
        n = Shape<start = 1, end = 2>(x)  h = Div(n, one)  k0 = Squeeze(h)  k = Div(k0, two)  back = Neg(k)
        u = Trilu<upper = 1>(x, back)  l = Trilu<upper = 0>(x, k)  m = MatMul(u, l)  y = Sub(m, x) }""",
        ROWS,
    ),
    "pads": Text(
        """(float[b,3,h,w] x) => (float y) <int64[1] eight = {8}, int64[2] zero = {0, 0}> {
        s = Shape<start = 2>(x)  r = Mod(s, eight)  q = Sub(eight, r)  p = Mod(q, eight)
        two = Constant<value_ints = [2]>()
        a = Div(p, two)  c = Sub(p, a)  pads = Concat<axis = 0>(zero, a, zero, c)
        y = Pad<mode = "reflect">(x, pads) }""",
        {"b": (1, 2), "h": range(9, 40), "w": range(9, 40)},
    ),
    "crop": Text(
        """(float[b,3,h,w] x) => (float y) <int64[1] ten = {10}, int64[2] zero = {0, 0}> {
        s = Shape<start = 2>(x)  p = Sub(ten, s)  pads = Concat<axis = 0>(zero, zero, zero, p)  y = Pad(x, pads) }""",
        {"b": (1, 2), "h": range(4, 30), "w": range(4, 30)},
    ),
    "edges": Text(
        """(float[b,n] x) => (float y) <int64[1] zero = {0}> {
        n = Shape<start = 1>(x)  two = Constant<value_ints = [2]>()  h = Div(n, two)
        pads = Concat<axis = 0>(zero, h, zero, n)
        p = Pad<mode = "wrap">(x, pads)  e = Pad<mode = "edge">(p, pads)  y = Relu(e) }""",
        SOME,
        opset=19,
    ),
    "backwards": Text(
        """(float[b,n,4] x) => (float y, float z) <int64[1] axis = {1}, int64[1] one = {1}> {
        n = Shape<start = 1, end = 2>(x)  two = Constant<value_ints = [2]>()  h = Div(n, two)  step = Neg(h)
        step1 = Sub(step, one)
        first = Sub(n, one)  low = Constant<value_ints = [-9223372036854775807]>()
        y = Slice(x, first, low, axis, step1)  back = Neg(h)  z = Slice(x, back, n, axis) }""",
        ROWS,
    ),
    "same-name": Text(
        "(float[n,4] x, float[n,4] y) => (float z) { s = Concat<axis = 0>(x, y)  z = Softmax<axis = 0>(s) }",
        {"n": range(1, 12)},
    ),
    "broadcast": Text(
        "(float[a,n,4] x, float[b,m,4] y) => (float z) { s = Add(x, y)  e = Exp(s)  z = Mul(e, x) }",
        {"a": (1, 4), "b": (1, 4), "n": (1, 6), "m": (1, 6)},
    ),
    "unknown-rank": Text(
        """(float[] x) => (float y) <int64[2] two = {-1, 2}> {
        s = Relu(x)  t = Reshape(s, two)  m = Softmax<axis = -1>(t)  n = Shape(x)  y = Reshape(m, n) }""",
        {"b": (1, 2, 3), "n": (1, 2, 5, 9)},
        dims={"x": ("b", "n", 4)},
    ),
    "scalars": Text(
        """(float x, float[n] y, int64 k) => (float z, float w) <int64[1] zero = {0}> {
        z = Mul(x, y)  i = Unsqueeze(k, zero)  g = Gather<axis = 0>(y, k)  w = Add(g, x) }""",
        {"n": (1, 2, 5, 9)},
        {"k": 1},
    ),
    "nothing": Text(
        """(float[b,n,4] x) => (float y, float z) <int64[1] one = {1}, int64[1] zero = {0}> {
        a = Slice(x, zero, zero, one)  c = Concat<axis = 1>(a, x)  s = ReduceSum<keepdims = 0>(c, one)
        y = Add(s, s)  e = Relu(a)  z = Concat<axis = 1>(e, a) }""",
        ROWS,
    ),
    "quotients": Text(
        """(float[b,n] x, float[m] y) => (int64 z) <int64[1] minus = {-3}, int64[1] five = {5}> {
        n = Shape<start = 1>(x)  m = Shape(y)  d = Sub(m, n)  q = Div(d, five)  r = Mod(d, five)  t = Mod(d, minus)
        u = Div(d, minus)  v = Mod<fmod = 1>(d, five)  w = Mul(q, t)  g = Max(q, r, n)  h = Min(q, u)  a = Abs(d)
        s = Sign(d)  p = Concat<axis = 0>(q, r, t, u, v, w, g, h, a, s)  z = Neg(p) }""",
        {"b": (1, 2), "n": range(1, 40), "m": range(1, 40)},
    ),
    "quotients-of-sizes": Text(
        """(float[n,4] x, float[m,4] y) => (float z, int64 k) <int64[1] zero = {0}, int64[1] one = {1}> {
        n = Shape<start = 0, end = 1>(x)  m = Shape<start = 0, end = 1>(y)  d = Sub(n, m)  q = Div(d, m)
        r = Mod(d, n)
        p = Mod(n, m)  e = Max(r, one)  z = Slice(x, zero, e, zero)  k = Concat<axis = 0>(q, r, p) }""",
        {"n": range(1, 40), "m": range(1, 40)},
    ),
    "narrow-integers": Text(
        """(float[n] x) => (int32 y, uint8 z, int8 w, float f) {
        n = Shape(x)  m = Mul(n, n)  y = Cast<to = 6>(m)  z = Cast<to = 2>(m)  w = Cast<to = 3>(m)
        h = Cast<to = 10>(m)  f = Cast<to = 1>(h) }""",
        {"n": (1, 2, 15, 16, 17, 100, 255, 256, 257, 300)},
    ),
    "sizes-as-values": Text(
        """(float[b,n] x) => (float y, bool c, int64 z) <float half = {0.5}, int64 seven = {7}> {
        n = Shape<start = 1>(x)  f = Cast<to = 1>(n)  h = Mul(f, half)  r = Round(h)  e = Ceil(h)  q = Sqrt(f)
        y = Sum(h, r, e, q)
        c = Greater(n, seven)  a = Where(c, n, seven)  i = Cast<to = 7>(c)  z = Add(a, i) }""",
        ROWS,
    ),
    "decided-by-size": Text(
        """(float[b,n,4] x) => (float y) <int64[1] seven = {7}, int64[1] three = {3}, int64[1] axis = {1}> {
        zero = Constant<value_ints = [0]>()  n = Shape<start = 1, end = 2>(x)
        c = Greater(n, seven)  k = Where(c, three, n)  a = Slice(x, zero, k, axis)
        m = Min(n, seven)  b = Slice(x, zero, m, axis)  y = Concat<axis = 1>(a, b) }""",
        ROWS,
    ),
    "branch": Text(
        """(float[b,n,4] x) => (float y) <int64 seven = {7}, int64[1] one = {1}> {
        n = Shape<start = 1, end = 2>(x)  k = Squeeze(n)  c = Less(k, seven)
        y = If<then_branch = t () => (float a) { a = Softmax<axis = 1>(x) },
               else_branch = e () => (float v) { s = ReduceSum(x, one)  v = Concat<axis = 1>(s, x) }>(c) }""",
        ROWS,
    ),
    "size-one-of-many": Text(
        """(float[b,n,4] x) => (float y) <int64[1] axis = {1}, int64[1] minus = {-1}> {
        n = Shape<start = 1, end = 2>(x)  two = Constant<value_ints = [2]>()  h = Div(n, two)
        zero = Constant<value_ints = [0]>()
        a = Slice(x, zero, h, axis)  m = ReduceMean(x, axis)  y = Add(a, m) }""",
        {"b": (1, 2, 3), "n": range(2, 12)},
    ),
    "squeezed": Text(
        """(float[b,n,4] x) => (float y) <int64[1] one = {1}, int64[3] s = {0, 0, -1}, int64[2] t = {-1, 2}> {
        u = Unsqueeze(x, one)  v = Squeeze(u, one)  w = Reshape(v, t)  a = Shape(x)  z = Reshape(w, a)
        y = Reshape(z, s) }""",
        SOME,
    ),
    "split": Text(
        """(float[b,n,4] x) => (float y, float z) <int64[1] one = {1}> {
        n = Shape<start = 1, end = 2>(x)  three = Constant<value_ints = [3]>()  k = Div(n, three)  r = Sub(n, k)
        sizes = Concat<axis = 0>(k, r)  a, c = Split<axis = 1>(x, sizes)  y = Neg(a)  z = Exp(c) }""",
        ROWS,
    ),
    "split-evenly": Text(
        """(float[b,n,4] x) => (float y, float z) { y, m, z0 = Split<axis = 1, num_outputs = 3>(x)
        z = Concat<axis = 1>(z0, m) }""",
        {"b": (1, 2), "n": range(5, 40)},
    ),
    "last-rows": Text(
        """(float[b,n,4] x, int64[b] at) => (float y, float z, float w) <int64[1] one = {1}> {
        i = Unsqueeze(at, one)  y = GatherND<batch_dims = 1>(x, i)  deep0 = Shape<start = 1, end = 2>(x)
        deep = Squeeze(deep0)  values = Constant<value_floats = [-1.0, 2.0]>()
        oh = OneHot<axis = -1>(at, deep, values)  w = Identity(oh)
        n = Shape<start = 1, end = 2>(x)  last = Sub(n, one)  z = Gather<axis = 1>(x, last) }""",
        SOME,
        {"at": 1},
    ),
    "scattered": Text(
        """(float[b,n,4] x, float[b,m,4] u) => (float y, float z) <int64 zero = {0}, int64 step = {1}> {
        s = Shape(u)  m0 = Shape<start = 1, end = 2>(u)  m = Squeeze(m0)  r = Range(zero, m, step)
        i0 = Constant<value_ints = [1, -1, 1]>()  i1 = Reshape(r, i0)  i = Expand(i1, s)
        n0 = Shape<start = 1, end = 2>(x)  n = Squeeze(n0)
        j = Mod(i, n)  y = ScatterElements<axis = 1, reduction = "add">(x, j, u)
        z = GatherElements<axis = 1>(x, j) }""",
        {"b": (1, 2, 3), "n": range(1, 20), "m": range(1, 20)},
    ),
    "top": Text(
        """(float[b,n] x) => (float y, int64 z) <int64[1] one = {1}, int64[1] five = {5}> {
        n = Shape<start = 1>(x)  k = Min(n, five)  y, z = TopK<axis = 1>(x, k) }""",
        ROWS,
    ),
    "many-sums": Text(
        """(float[b,h,w,4] x) => (float y) <int64[2] axes = {1, 2}, int64[1] last = {-1}> {
        a = ReduceMean(x, axes)  c = ReduceMax(x, axes)  l = ReduceL2<keepdims = 1>(x, last)
        s = ReduceLogSumExp<keepdims = 1>(l, axes)
        d = Sub(x, a)  e = Div(d, c)  f = Mul(e, s)  y = ReduceProd(f, last) }""",
        {"b": (1, 2), "h": range(1, 20), "w": range(1, 20)},
    ),
    "resized": Text(
        """(float[b,2,h,w] x, float[b,2,k,l] z) => (float y, float u) <float[4] roi = {0, 0, 0, 0}> {
        s = Shape(z)  a = Resize<mode = "linear", coordinate_transformation_mode = "half_pixel">(x, , , s)
        y = Add(a, z)  f = Constant<value_floats = [1.0, 1.0, 1.5, 0.75]>()
        u = Resize<mode = "nearest">(x, , f) }""",
        {"b": (1, 2), "h": range(2, 30), "w": range(2, 30), "k": range(2, 30), "l": range(2, 30)},
    ),
    "scales-of-sizes": Text(
        """(float[b,2,h,w] x) => (float y) {
        s = Shape<start = 2>(x)  f = Cast<to = 1>(s)  t = Constant<value_floats = [24.0, 32.0]>()  r = Div(t, f)
        one = Constant<value_floats = [1.0, 1.0]>()  scales = Concat<axis = 0>(one, r)
        y = Resize<mode = "linear", coordinate_transformation_mode = "asymmetric">(x, , scales) }""",
        {"b": (1, 2), "h": (8, 12, 16, 24, 48), "w": (8, 16, 32, 64)},
    ),
    "flat": Text(
        """(float[b,n,w] x) => (float y, float z) <int64[1] one = {-1}, int64[3] keep = {0, -1, 1}> {
        y = Flatten<axis = 2>(x)  f = Reshape(x, one)  n = Size(x)  c = Cast<to = 1>(n)  m = Div(f, c)  s = Shape(x)
        r = Reshape(m, s)  t = Transpose<perm = [2, 0, 1]>(r)  u = Transpose<perm = [0, 2, 1]>(x)
        z = MatMul(r, u)  }""",
        {"b": (1, 2, 3), "n": range(1, 12), "w": range(1, 12)},
    ),
    "loop": Text(
        """(float[b,n,4] x) => (float y, float z) <int64[1] zero = {0}> {
        n = Shape<start = 1, end = 2>(x)  k = Squeeze(n)  yes = Constant<value = bool {1}>()
        one = Constant<value_ints = [1]>()  h = ReduceSum<keepdims = 0>(x, one)
        y, z = Loop<body = l (int64 i, bool c, float[?,4] s) => (bool d, float[?,4] t, float[?,4] o) {
            r = Gather<axis = 1>(x, i)  a = Add(s, r)  t = Tanh(a)  o = Mul(t, r)  d = Identity(c) }>(k, yes, h) }""",
        SOME,
    ),
    "scan": Text(
        """(float[n,b,4] x) => (float y, float z) <int64[1] zero = {0}> {
        h = ReduceMax<keepdims = 0>(x, zero)
        y, z = Scan<num_scan_inputs = 1, body = l (float[b,4] s, float[b,4] v) => (float[b,4] t, float[b,4] o) {
            a = Mul(s, v)  t = Sigmoid(a)  o = Sub(t, v) }>(h, x) }""",
        SOME,
    ),
    "filter": Text(
        """(float[n,4] x, bool[n] k) => (float y, float z, int64 i) <int64[1] one = {1}> {
        y = Compress<axis = 0>(x, k)  i = NonZero(k)  t = Transpose(y)  z = MatMul(y, t) }""",
        {"n": range(1, 30)},
    ),
    "kept-columns": Text(
        """(float[b,n,4] x, bool[n] k) => (float y) {
        a = Compress<axis = 1>(x, k)  s = Softmax<axis = 2>(a)  y = Concat<axis = 1>(s, x) }""",
        SOME,
    ),
    "thirds": Text(
        """(float[b,n,12] x) => (float y) <int64 zero = {0}, int64 one = {1}, int64 last = {-1}> {
        parts = Constant<value_ints = [0, 0, 3, 4]>()
        r = Reshape(x, parts)  t = Transpose<perm = [2, 0, 1, 3]>(r)  q = Gather<axis = 0>(t, zero)
        k = Gather<axis = 0>(t, one)  v = Gather<axis = 0>(t, last)  e = Exp(v)  a = Add(q, k)  y = Mul(a, e) }""",
        SOME,
    ),
    "convolutions-of-one": Text(
        """(float[b,4,h,w] x) => (float y) {
        sides = Constant<value_ints = [8, 4, 1, 1]>()  k = ConstantOfShape<value = float[1] {0.3}>(sides)
        y = Conv<strides = [2, 1]>(x, k) }""",
        {"b": (1, 2), "h": range(1, 12), "w": range(1, 40)},
    ),
    "one-pool": Text(
        """(float[b,4,h,w] x) => (float y, float z) {
        y = MaxPool<kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1>(x)
        z = AveragePool<kernel_shape = [2, 2], auto_pad = "SAME_UPPER", strides = [2, 2]>(x) }""",
        {"b": (1, 2), "h": range(3, 20), "w": range(3, 20)},
    ),
    "shared-bytes": Text(
        """(float[b,n,4] x) => (float y, float z, float w) <int64[2] s = {-1, 4}> {
        y = Reshape(x, s)  z = Identity(y)  a = Shape(x)  v = Reshape(z, a)  w = Identity(v) }""",
        ROWS,
    ),
    "out-of-range": Text(
        """(float[b,n] x, float[m] y) => (float z) <int64[1] one = {1}, int64[1] zero = {0}> {
        m = Shape(y)  big = Constant<value_ints = [9000]>()  z = Slice(x, m, big, one)  }""",
        {"b": (1, 2), "n": range(1, 12), "m": range(1, 12)},
    ),
}
