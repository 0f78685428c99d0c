"""Recurrent layers written as Python loops, as PyTorch's exporter writes them."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import pytest

import tunewright

torch = pytest.importorskip("torch")
ort = pytest.importorskip("onnxruntime")
F, H = 5, 6


class Gates(torch.nn.Module):
    """An LSTM by hand: chunks of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = torch.nn.Linear(F, 4 * H), torch.nn.Linear(H, 4 * H)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.zeros(x.size(1), 6)
        c = torch.zeros(x.size(1), 6)
        outs: list[torch.Tensor] = []
        for t in range(x.size(0)):
            i, f, g, o = (self.ih(x[t]) + self.hh(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outs.append(h)
        return torch.stack(outs), h


class Cells(torch.nn.Module):
    """Two LSTMCells, one over the other, and a head inside the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.LSTMCell(F, H), torch.nn.LSTMCell(H, H)
        self.head = torch.nn.Linear(H, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros((x.size(1), 6))
        c = h
        k = h
        d = h
        outs: list[torch.Tensor] = []
        for t in range(x.size(0)):
            h, c = self.one(x[t], (h, c))
            k, d = self.two(h, (k, d))
            outs.append(torch.relu(self.head(k)).unsqueeze(1))
        return torch.cat(outs, 1)


class Projected(torch.nn.Module):
    """A GRU whose part of the input is one product in front of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = torch.nn.Linear(F, 3 * H), torch.nn.Linear(H, 3 * H)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p = self.ih(x)
        h = torch.zeros(x.size(1), 6)
        outs: list[torch.Tensor] = []
        for t in range(p.shape[0]):
            ir, iz, inner = p[t].chunk(3, -1)
            hr, hz, hn = self.hh(h).chunk(3, -1)
            z = torch.sigmoid(iz + hz)
            n = torch.tanh(inner + torch.sigmoid(ir + hr) * hn)
            h = (1 - z) * n + z * h
            outs.append(h)
        return torch.stack(outs), h


class Unbound(torch.nn.Module):
    """Slices by unbind, which is SplitToSequence."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.r = torch.nn.Parameter(torch.randn(F, H)), torch.nn.Parameter(torch.randn(H, H) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.size(1), 6)
        parts = x.unbind(0)
        for t in range(len(parts)):
            h = torch.tanh(torch.mm(parts[t], self.w) + torch.mm(h, self.r))
        return h


@pytest.mark.parametrize(
    ("module", "layers"),
    [(Gates, ["LSTM"]), (Cells, ["LSTM", "LSTM"]), (Projected, ["GRU"]), (Unbound, ["RNN"])],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)  # fmt: skip
def test_exported_loops_become_layers(module: type[torch.nn.Module], layers: list[str]) -> None:
    torch.manual_seed(0)
    file, x = io.BytesIO(), torch.randn(7, 3, F)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            torch.jit.script(module()), (x,), file, input_names=["x"], dynamic_axes={"x": {0: "time", 1: "batch"}},
            opset_version=17, dynamo=False,
        )  # fmt: skip
    model = onnx.load_from_string(file.getvalue())
    compiled = tunewright.Core().compile_model(model, "CPU.HOST")
    assert [n.op for n in compiled.graph.nodes if n.op in ("LSTM", "GRU", "RNN")] == layers
    session = ort.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    for time, batch in ((7, 3), (1, 1), (20, 2)):
        inputs = {"x": np.random.default_rng(time).standard_normal((time, batch, F)).astype(np.float32)}
        got = compiled(inputs)
        for info, want in zip(model.graph.output, session.run(None, inputs), strict=True):
            np.testing.assert_allclose(got[info.name], want, rtol=1e-5, atol=1e-5)
