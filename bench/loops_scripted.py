"""Modules whose loops torch.jit.script keeps. (No future annotations: the compiler reads them.)"""

from typing import List, Tuple  # noqa: UP035 (what the compiler of torch knows)

import torch
from torch import Tensor, nn


class Cell(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.w, self.r = nn.Linear(inputs, 256), nn.Linear(64, 256, bias=False)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        i, f, o, u = (self.w(x) + self.r(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c


class Stacked(nn.Module):
    """An LSTM by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell(40)

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros(x.size(1), 64), torch.zeros(x.size(1), 64)
        out: List[Tensor] = []  # noqa: UP006
        for t in range(x.size(0)):
            h, c = self.cell(x[t], h, c)
            out.append(h)
        return torch.stack(out)


class Greedy(nn.Module):
    """Decodes up to 50 tokens, until one of them ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.embedding, self.out = Cell(32), nn.Embedding(200, 32), nn.Linear(64, 200)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        c = torch.zeros_like(x)
        token, score = torch.zeros(1, dtype=torch.long), torch.zeros(1)
        i, done = 0, False
        while i < 50 and not done:
            x, c = self.cell(self.embedding(token), x, c)
            logits = self.out(x)
            token = logits.argmax(1)
            score = score + logits.max(1)[0]
            if bool((token == 199).all()):
                done = True
            i += 1
        return x, score


MODULES = {
    "Stacked": (Stacked, (torch.randn(9, 2, 40),), {0: "t", 1: "b"}),
    "Greedy": (Greedy, (torch.randn(1, 64),), {0: "b"}),
}
