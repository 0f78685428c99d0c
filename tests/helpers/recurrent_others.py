"""Loops that are nearly recurrent layers: one thing is not as it would have to be."""

from __future__ import annotations

from dataclasses import dataclass

from helpers.recurrent_forms import Form


@dataclass(frozen=True)
class Other:
    """``reason``: part of what the log says."""

    form: Form
    reason: str


def other(cell: str, loop: str, reason: str, *changes: tuple[str, str]) -> Other:
    return Other(Form(cell, loop, change=changes), reason)


OTHERS = {
    "forget_of_h": other("torch_lstm", "scan", "old state", ("Mul(sf, c)", "Mul(sf, h)")),
    "tanh_of_old_c": other("torch_lstm", "scan", "one of another state", ("Tanh(cn)", "Tanh(c)")),
    "gate_of_c": other("torch_lstm", "scan", "reads another state", ("(h, R, rb)", "(c, R, rb)")),
    "peephole": other("torch_lstm", "scan", "another state", ("so = Sigmoid(go)", "p = Add(go, c) so = Sigmoid(p)")),
    "peephole_of_old_c": other("peephole_lstm", "scan", "another state", ("po = Mul(wo, cn)", "po = Mul(wo, c)")),
    "peephole_of_half_c": other(
        "peephole_lstm", "scan", "part of the cell's state", ("po = Mul(wo, cn)", "po = Mul(wo, k)")
    ),
    "other_gate": other("torch_lstm", "scan", "different activations", ("so = Sigmoid(go)", "so = HardSigmoid(go)")),
    "scaled": other("keras_lstm", "scan", "not one product", ("n = Mul(si, tg)", "n0 = Mul(si, tg) n = Mul(n0, half)")),
    "twice_i": other("keras_lstm", "scan", "not one product", ("n = Mul(si, tg)", "n0 = Mul(si, tg) n = Mul(n0, si)")),
    "swapped": other("torch_lstm", "scan", "no LSTM", ("float[N,6] hn, float[N,6] cn", "float[N,6] cn, float[N,6] hn")),
    "clipped": other("torch_lstm", "scan", "Clip", ("tc = Tanh(cn)", "cc = Clip(cn, zero) tc = Tanh(cc)")),
    "sum": other("torch_gru", "scan", "no mixture", ("Sub(h, nn)", "Add(h, nn)")),
    "half": other("tf_gru", "scan", "no mixture", ("Sub(one, sz)", "Sub(half, sz)")),
    "reset_of_x": other("torch_gru", "scan", "reset gate", ("n0 = Add(an, rs)", "ra = Mul(sr, an) n0 = Add(ra, rs)")),
    "reset_twice": other(
        "tf_gru",
        "scan",
        "something else than the state's product",
        ("qb = Add(q, bc)", "p = MatMul(h, Q) pq = Add(q, p) qb = Add(pq, bc)"),
    ),
    "rnn_plus_h": other("rnn", "scan", "one activation", ("hn = Tanh(s)", "th = Tanh(s) hn = Add(th, h)")),
    "old_h": other("torch_gru", "scan", "more than a function", ("o = Identity(hn)", "o = Identity(h)")),
    "all_c": other("torch_lstm", "scan", "more than a function", ("o = Identity(hn)", "o = Identity(cn)")),
    "data_decides": other(
        "rnn",
        "torch_scan_output",
        "condition",
        ("cond_out = Cast<to=9>(true)", ""),
        ("hn = Tanh(s)", "hn = Tanh(s) sum = ReduceSum<keepdims=0>(hn) cond_out = Less(sum, half)"),
    ),
    "one_less": other(
        "rnn",
        "torch_scan_output",
        "before the end",
        ("steps = Gather(shape, i0)", "all = Gather(shape, i0) steps = Sub(all, i1)"),
    ),
    "batch_many": other(
        "rnn",
        "torch_scan_output",
        "before the end",
        ("steps = Gather(shape, i0)", "steps = Gather(shape, i1)"),
    ),
    "first_slice": other(
        "rnn",
        "torch_scan_output",
        "no slice",
        ("xt = Gather<axis=0>(x, i)", "xt = Gather<axis=0>(x, i0)"),
    ),
    "next_slice": other(
        "rnn",
        "torch_scan_output",
        "no slice",
        ("xt = Gather<axis=0>(x, i)", "at = Sub(i, i1) xt = Gather<axis=0>(x, at)"),
    ),
    "changing_weights": other(
        "rnn",
        "torch_scan_output",
        "Cast",
        ("xt = Gather<axis=0>(x, i)", "xt = Gather<axis=0>(x, i) k = Cast<to=1>(i) Rk = Mul(R, k)"),
        ("Gemm(h, R, b)", "Gemm(h, Rk, b)"),
    ),
    "counted_in": other(
        "rnn",
        "torch_scan_output",
        "Cast",
        ("xt = Gather<axis=0>(x, i)", "xt = Gather<axis=0>(x, i) k = Cast<to=1>(i)"),
        ("s = Add(r, a)", "ra = Add(r, a) s = Add(ra, k)"),
    ),
    "front": other("rnn", "torch_sequence", "at its end", ("SequenceInsert(outs, hn)", "SequenceInsert(outs, hn, i0)")),
    "length_read": other(
        "rnn",
        "torch_sequence",
        "at its end",
        ("xt = Gather<axis=0>(x, i)", "l = SequenceLength(outs) xt = Gather<axis=0>(x, l)"),
    ),
    "steady_time": other("rnn", "tf_while", "slice", ("time_next = Add(time, j1)", "time_next = Add(time, j0)")),
    "runs_once": other("rnn", "tf_while", "once over nothing", ("start = Less(j0, steps)", "start = Identity(true)")),
    "other_batch": other("rnn", "scan", "batch", ("[N,6] h0", "[M,6] h0")),
}
