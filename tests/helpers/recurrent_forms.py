"""Recurrent layers as exporters write them: cells (what a step computes) in loops (how the steps are counted)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser

F, H = 5, 6

CELLS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    # torch.nn.LSTMCell: two Gemms, gates i, f, g, o
    "torch_lstm": (
        """a = Gemm<transB=1>(xt, W, b) r = Gemm<transB=1>(h, R, rb) g = Add(a, r) gi, gf, gg, go = Split<axis=1,
        num_outputs=4>(g) si = Sigmoid(gi) sf = Sigmoid(gf) tg = Tanh(gg) so = Sigmoid(go) k = Mul(sf, c)
        n = Mul(si, tg) cn = Add(k, n) tc = Tanh(cn) hn = Mul(so, tc)""",
        {"W": (4 * H, F), "R": (4 * H, H), "b": (4 * H,), "rb": (4 * H,)},
    ),
    # tf.nn.rnn_cell.BasicLSTMCell: one product, gates i, j, f, o, a forget bias of 1
    "tf_lstm": (
        """xh = Concat<axis=1>(xt, h) m = MatMul(xh, W) g = Add(m, b) gi, gj, gf, go = Split<axis=1>(g, sizes)
        fb = Add(gf, one) sf = Sigmoid(fb) k = Mul(c, sf) si = Sigmoid(gi) tj = Tanh(gj) n = Mul(si, tj)
        cn = Add(k, n) tc = Tanh(cn) so = Sigmoid(go) hn = Mul(tc, so)""",
        {"W": (F + H, 4 * H), "b": (4 * H,)},
    ),
    # Keras: two products, one bias, gates i, f, c, o, by Slice
    "keras_lstm": (
        """a = MatMul(xt, W) r = MatMul(h, R) s = Add(a, r) g = Add(s, b) gi = Slice(g, s0, s1, ax1)
        gf = Slice(g, s1, s2, ax1) gc = Slice(g, s2, s3, ax1) go = Slice(g, s3, send, ax1) si = Sigmoid(gi)
        sf = Sigmoid(gf) k = Mul(sf, c) tg = Tanh(gc) n = Mul(si, tg) cn = Add(k, n) so = Sigmoid(go) tc = Tanh(cn)
        hn = Mul(so, tc)""",
        {"W": (F, 4 * H), "R": (H, 4 * H), "b": (4 * H,)},
    ),
    # a product for each gate, Keras' old hard sigmoid, and f = 1 - i
    "hard_lstm": (
        """ai = MatMul(xt, Wi) ri = MatMul(h, Ri) p0 = Add(ai, ri) p1 = Mul(p0, fifth) p2 = Add(p1, half)
        si = Clip(p2, zero, one) af = MatMul(xt, Wf) rf = MatMul(h, Rf) f0 = Add(af, rf) f1 = Mul(f0, fifth)
        f2 = Add(f1, half) sf = Clip(f2, zero, one) ac = MatMul(xt, Wc) rc = MatMul(h, Rc) q0 = Add(ac, rc)
        tg = Softsign(q0) ao = MatMul(xt, Wo) ro = MatMul(h, Ro) o0 = Sub(ao, ro) o1 = Mul(o0, fifth)
        o2 = Add(o1, half) so = Clip(o2, zero, one) k = Mul(sf, c) n = Mul(si, tg) cn = Add(k, n) tc = Tanh(cn)
        hn = Mul(so, tc)""",
        {f"{k}{g}": (F if k == "W" else H, H) for g in "ifco" for k in "WR"},
    ),
    # tf.nn.rnn_cell.LSTMCell(use_peepholes=True)
    "peephole_lstm": (
        """xh = Concat<axis=1>(xt, h) m = MatMul(xh, W) g = Add(m, b) gi, gj, gf, go = Split<axis=1>(g, sizes)
        fb = Add(gf, one) pf = Mul(wf, c) ff = Add(fb, pf) sf = Sigmoid(ff) k = Mul(sf, c) pi = Mul(c, wi)
        ii = Add(pi, gi) si = Sigmoid(ii) tj = Tanh(gj) n = Mul(si, tj) cn = Add(k, n) po = Mul(wo, cn) oo = Add(go, po)
        so = Sigmoid(oo) tc = Tanh(cn) hn = Mul(so, tc)""",
        {"W": (F + H, 4 * H), "b": (4 * H,), "wi": (H,), "wf": (H,), "wo": (H,)},
    ),
    "coupled_lstm": (
        """xh = Concat<axis=-1>(h, xt) g = Gemm<alpha=0.5,beta=2.0>(xh, W, b) si0, sg0, so0 = Split<axis=-1,
        num_outputs=3>(g) si = Sigmoid(si0) sg = Tanh(sg0) so = Sigmoid(so0) sf = Sub(one, si) k = Mul(sf, c)
        n = Mul(si, sg) cn = Add(k, n) tc = Tanh(cn) hn = Mul(so, tc)""",
        {"W": (F + H, 3 * H), "b": (3 * H,)},
    ),
    # torch.nn.GRUCell, Keras' reset_after: the reset gate behind the product
    "torch_gru": (
        """a = Gemm<transB=1>(xt, W, b) r = Gemm<transB=1>(h, R, rb) ar, az, an = Split<axis=1, num_outputs=3>(a)
        rr, rz, rn = Split<axis=1, num_outputs=3>(r) r0 = Add(ar, rr) sr = Sigmoid(r0) z0 = Add(az, rz)
        sz = Sigmoid(z0) rs = Mul(sr, rn) n0 = Add(an, rs) nn = Tanh(n0) d = Sub(h, nn) e = Mul(sz, d)
        hn = Add(nn, e)""",
        {"W": (3 * H, F), "R": (3 * H, H), "b": (3 * H,), "rb": (3 * H,)},
    ),
    # tf.nn.rnn_cell.GRUCell: the reset gate in front of the product
    "tf_gru": (
        """xh = Concat<axis=1>(xt, h) m = MatMul(xh, W) g = Add(m, b) sg = Sigmoid(g) sr, sz = Split<axis=1,
        num_outputs=2>(sg) rh = Mul(sr, h) xr = Concat<axis=1>(xt, rh) q = MatMul(xr, Wc) qb = Add(q, bc) nn = Tanh(qb)
        k = Mul(sz, h) z1 = Sub(one, sz) n = Mul(z1, nn) hn = Add(k, n)""",
        {"W": (F + H, 2 * H), "b": (2 * H,), "Wc": (F + H, H), "bc": (H,)},
    ),
    # the update gate says how much of the new state comes in
    "other_gru": (
        """a = MatMul(xt, W) ar, az, an = Split<axis=1, num_outputs=3>(a) rr = MatMul(h, Rr) rz = MatMul(h, Rz)
        r0 = Add(ar, rr) sr = Sigmoid(r0) z0 = Add(az, rz) z1 = Add(z0, b) sz = Sigmoid(z1) rh = Mul(h, sr)
        rn = MatMul(rh, Rn) n0 = Add(an, rn) nn = Tanh(n0) z2 = Sub(one, sz) k = Mul(z2, h) n = Mul(sz, nn)
        hn = Add(k, n)""",
        {"W": (F, 3 * H), "Rr": (H, H), "Rz": (H, H), "Rn": (H, H), "b": (H,)},
    ),
    "rnn": (
        "a = MatMul(xt, W) r = Gemm(h, R, b) s = Add(r, a) hn = Tanh(s)",
        {"W": (F, H), "R": (H, H), "b": (H,)},
    ),
    "relu_rnn": ("r = MatMul(h, R) a = Gemm(xt, W, r) hn = Relu(a)", {"W": (F, H), "R": (H, H)}),
}

#: x [T,B,F] (or [B,T,F] where ``axis`` is 1), the first states h0 and c0; y: all states, and the last ones
LOOPS: dict[str, str] = {
    "scan": """{states}, y = Scan<num_scan_inputs=1, body = b ({formal}, float[N,{F}] xt) => ({next}, float[N,{H}] o)
        {{ {cell} o = Identity(hn) }}>({first}, x)""",
    "scan_reverse": """{states}, y = Scan<num_scan_inputs=1, scan_input_directions=[1], scan_output_directions=[1],
        body = b ({formal}, float[N,{F}] xt) => ({next}, float[N,{H}] o) {{ {cell} o = Identity(hn) }}>({first}, x)""",
    "scan_turned": """{states}, y = Scan<num_scan_inputs=1, scan_input_directions=[1],
        body = b ({formal}, float[N,{F}] xt) => ({next}, float[N,{H}] o) {{ {cell} o = Identity(hn) }}>({first}, x)""",
    "scan_axis": """{states}, y = Scan<num_scan_inputs=1, scan_input_axes=[1], scan_output_axes=[1],
        body = b ({formal}, float[N,{F}] xt) => ({next}, float[N,{H}] o) {{ {cell} o = Identity(hn) }}>({first}, x)""",
    # for t in range(x.size(0)), out.append(h), torch.stack(out)
    "torch_scan_output": """shape = Shape(x) steps = Gather(shape, i0)
        {states}, y = Loop(steps, true, {first})
        <body = b (int64 i, bool go_on, {formal}) => (bool cond_out, {next}, float[N,{H}] o)
        {{ cond_out = Cast<to=9>(true) xt = Gather<axis=0>(x, i) {cell} o = Identity(hn) }}>""",
    "torch_sequence": """shape = Shape(x) steps = Gather(shape, i0) empty = SequenceEmpty<dtype=1>()
        {states}, collected = Loop(steps, true, {first}, empty)
        <body = b (int64 i, bool go_on, {formal}, seq(float[N,{H}]) outs)
               => (bool cond_out, {next}, seq(float[N,{H}]) outs_next)
        {{ cond_out = Identity(go_on) xt = Gather<axis=0>(x, i) {cell} outs_next = SequenceInsert(outs, hn) }}>
        y = ConcatFromSequence<axis=0, new_axis=1>(collected)""",
    # torch.cat of parts with an axis of their own
    "torch_joined": """shape = Shape(x) steps = Gather(shape, i0) empty = SequenceEmpty<dtype=1>()
        {states}, collected = Loop(steps, true, {first}, empty)
        <body = b (int64 i, bool go_on, {formal}, seq(float[1,N,{H}]) outs)
               => (bool cond_out, {next}, seq(float[1,N,{H}]) outs_next)
        {{ cond_out = Identity(go_on) xt = Gather<axis=0>(x, i) {cell}
           wide = Unsqueeze(hn, v0) outs_next = SequenceInsert(outs, wide) }}>
        y = ConcatFromSequence<axis=0>(collected)""",
    # for t in range(x.size(0) - 1, -1, -1)
    "torch_reverse": """shape = Shape(x) steps = Gather(shape, i0)
        {states}, y = Loop(steps, true, {first})
        <body = b (int64 i, bool go_on, {formal}) => (bool cond_out, {next}, float[N,{H}] o)
        {{ cond_out = Identity(go_on) last = Sub(steps, i1) back = Mul(i, minus) at = Add(back, last)
           xt = Gather<axis=0>(x, at) {cell} o = Identity(hn) }}>""",
    # x[:, t] of a batch-first input, results stacked along axis 1
    "torch_batch_first": """shape = Shape(x) steps = Gather(shape, i1) empty = SequenceEmpty<dtype=1>()
        {states}, collected = Loop(steps, true, {first}, empty)
        <body = b (int64 i, bool go_on, {formal}, seq(float[N,{H}]) outs)
               => (bool cond_out, {next}, seq(float[N,{H}]) outs_next)
        {{ cond_out = Identity(go_on) xt = Gather<axis=1>(x, i) {cell} outs_next = SequenceInsert(outs, hn) }}>
        y = ConcatFromSequence<axis=1, new_axis=1>(collected)""",
    # tf.while_loop over TensorArrays by tf2onnx: two counters, a condition of both, no trip count
    "tf_while": """shape = Shape(x) sh32 = Cast<to=6>(shape) steps = Gather(sh32, i0) most = Identity(far)
        start = Less(j0, steps)
        ended0, ended1, {states}, y = Loop(most, start, j0, j0, {first})
        <body = b (int64 i, bool go_on, int32 loop_counter, int32 time, {formal})
               => (bool cond_out, int32 counter_next, int32 time_next, {next}, float[N,{H}] o)
        {{ xt = Gather<axis=0>(x, time) {cell} counter_next = Add(loop_counter, j1) time_next = Add(time, j1)
           c1 = Less(time_next, steps) c2 = Less(counter_next, steps) cond_out = And(c1, c2) o = Identity(hn) }}>""",
    # the same by Keras with go_backwards: a trip count as well, and the input turned round in front
    "keras_while": """turned = Slice(x, minus1, least, v0, minus1) shape = Shape(turned) steps = Gather(shape, v0)
        rows = Cast<to=6>(steps) bound = Squeeze(rows) largest = ReduceMax<keepdims=0>(steps) start = Less(j0, bound)
        ended0, {states}, y = Loop(largest, start, j0, {first})
        <body = b (int64 i, bool go_on, int32 time, {formal})
               => (bool cond_out, int32 time_next, {next}, float[N,{H}] o)
        {{ xt = Gather<axis=0>(turned, time) {cell} time_next = Add(time, j1) cond_out = Less(time_next, bound)
           o = Identity(hn) }}>""",
    # Slice and Squeeze instead of Gather
    "sliced": """shape = Shape<start=0, end=1>(x) steps = Squeeze(shape)
        {states}, y = Loop(steps, , {first})
        <body = b (int64 i, bool go_on, {formal}) => (bool cond_out, {next}, float[N,{H}] o)
        {{ cond_out = Identity(go_on) from_ = Unsqueeze(i, v0) past = Add(from_, v1) part = Slice(x, from_, past, v0)
           xt = Squeeze(part, v0) {cell} o = Identity(hn) }}>""",
}
BATCH_FIRST = frozenset({"scan_axis", "torch_batch_first"})

CONSTANTS: dict[str, Any] = {
    "sizes": np.asarray([H] * 4), "one": np.float32(1), "half": np.float32(0.5), "fifth": np.float32(0.2),
    "zero": np.float32(0), "s0": np.asarray([0]), "s1": np.asarray([H]), "s2": np.asarray([2 * H]),
    "s3": np.asarray([3 * H]), "send": np.asarray([2**31 - 1]), "ax1": np.asarray([1]), "i0": np.asarray(0),
    "i1": np.asarray(1), "minus": np.asarray(-1), "minus1": np.asarray([-1]),
    "least": np.asarray([-(2**31)]), "v0": np.asarray([0]), "v1": np.asarray([1]), "j0": np.int32(0),
    "j1": np.int32(1), "Q": np.full((H, H), 0.3, np.float32), "far": np.asarray(2**31 - 1), "true": np.asarray(True),
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """``change``: pairs of texts, one of which is replaced by the other; ``dims`` of x; ``last``: final states too."""

    cell: str
    loop: str
    change: tuple[tuple[str, str], ...] = ()
    time: str = "T"
    batch: str = "N"
    last: bool = True
    seed: int = 0

    @property
    def states(self) -> list[str]:
        return ["h", "c"] if "lstm" in self.cell else ["h"]

    def model(self) -> onnx.ModelProto:
        cell, weights = CELLS[self.cell]
        text = LOOPS[self.loop].format(
            F=F, H=H, cell=cell, states=", ".join(f"{s}T" for s in self.states),
            first=", ".join(f"{s}0" for s in self.states), formal=", ".join(f"float[N,{H}] {s}" for s in self.states),
            next=", ".join(f"float[N,{H}] {s}n" for s in self.states),
        )  # fmt: skip
        first = [f"float[{self.batch},{H}] {s}0" for s in self.states]
        lead = f"{self.batch},{self.time}" if self.loop in BATCH_FIRST else f"{self.time},{self.batch}"
        last = [f"float[{self.batch},{H}] {s}T" for s in self.states] if self.last else []
        outputs = ", ".join([f"float[{lead},{H}] y", *last])
        text = f"g (float[{lead},{F}] x, {', '.join(first)}) => ({outputs}) {{ {text} }}"
        for old, new in self.change:
            assert old in text, (old, text)
            text = text.replace(old, new)
        made = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')
        rng = np.random.default_rng(self.seed)
        arrays = {k: (rng.standard_normal(shape) * 0.6).astype(np.float32) for k, shape in weights.items()}
        for name, array in {**CONSTANTS, **arrays}.items():
            if f" {name}," in f" {text}".replace("(", " ").replace(")", ",") or name in text:
                made.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
        return made

    def inputs(self, time: int, batch: int, seed: int = 1) -> dict[str, np.ndarray[Any, Any]]:
        rng = np.random.default_rng(seed)
        lead = (batch, time) if self.loop in BATCH_FIRST else (time, batch)
        arrays = {"x": rng.standard_normal((*lead, F)).astype(np.float32)}
        return {**arrays, **{f"{s}0": rng.standard_normal((batch, H)).astype(np.float32) for s in self.states}}
