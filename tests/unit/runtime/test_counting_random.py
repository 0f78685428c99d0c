"""Random chains of operations behind random numbers of rows: ONNX Runtime's results for none, one, some and all."""

from __future__ import annotations

import re

import numpy as np
import pytest

from helpers.counted_models import check, inside
from native.harness import native

pytestmark = native
ROWS = 24
CONSTANTS = """
    half = Constant <value = float {0.5}> ()
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    four = Constant <value_ints = [4]> ()
    eight = Constant <value_ints = [8]> ()
    most = Constant <value_ints = [9]> ()
    """
#: rows of eight to rows of eight; $ is a number of its own in each chain
STEPS = (
    "y = Sigmoid(x)",
    "m$ = MatMul(x, w) y = Tanh(m$)",
    "y = Softmax <axis = 0> (x)",
    "s$ = ReduceSum <keepdims = 1> (x, one) y = Sub(x, s$)",
    "s$ = ReduceSum <keepdims = 1> (x, zero) y = Add(x, s$)",
    "a$, b$ = Split <axis = 1, num_outputs = 2> (x) y = Concat <axis = 1> (b$, a$)",
    "t$ = Transpose <perm = [1, 0]> (x) u$ = Neg(t$) y = Transpose <perm = [1, 0]> (u$)",
    "n$ = Shape <start = 0, end = 1> (x) to$ = Concat <axis = 0> (n$, two, four) r$ = Reshape(x, to$) "
    "t$ = Transpose <perm = [0, 2, 1]> (r$) back$ = Concat <axis = 0> (n$, eight) y = Reshape(t$, back$)",
    "c$ = Slice(x, zero, one, one) f$ = Squeeze(c$, one) n$ = Shape(f$) v$, i$ = TopK(f$, n$) y = Gather(x, i$)",
    "c$ = Slice(x, one, two, one) f$ = Squeeze(c$, one) n$ = Shape(f$) k$ = Min(n$, most) v$, i$ = TopK(f$, k$) "
    "y = Gather(x, i$)",
    "k$ = Min(k, most) y = Slice(x, zero, k$, zero)",
    "y = Slice(x, one, most, zero)",
    "p$ = Slice(x, zero, one, one) g$ = Greater(p$, half) f$ = Squeeze(g$, one) y = Compress <axis = 0> (x, f$)",
    "l$ = ArgMax <axis = 1, keepdims = 0> (x) h$ = Gather(w, l$) y = Mul(x, h$)",
    "y = Concat <axis = 0> (x, x)",
    "i$ = CumSum(x, zero) y = Softmax <axis = 1> (i$)",
    "u$, f$, at$, c$ = Unique <axis = 0> (x) y = Mul(u$, half)",
)


@pytest.mark.parametrize("seed", range(16))
def test_random_chains(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text, name = (
        CONSTANTS
        + """
        means = ReduceMax <keepdims = 0> (x, one)
        m = Greater(means, half)
        y0 = Compress <axis = 0> (x, m)
    """,
        "y0",
    )
    for k, step in enumerate(rng.choice(STEPS, 5), 1):
        words = re.sub(r"\bx\b", name, step.replace("$", str(k)))
        text += re.sub(r"\by\b", f"y{k}", words) + "\n"
        name = f"y{k}"
    feeds = []
    for count in (13, 0, 1, 2, 5, ROWS):
        x = rng.random((ROWS, 8)) * 0.4
        x[rng.permutation(ROWS)[:count]] += 0.5
        w, k = rng.random((8, 8)).astype(np.float32), rng.integers(0, 12, 1)
        feeds.append({"x": x.astype(np.float32), "w": w, "k": k})
    one = check(f"g (float[{ROWS},8] x, float[8,8] w, int64[1] k) => (float[n,8] {name}) {{ {text} }}", feeds)
    assert inside(one)
