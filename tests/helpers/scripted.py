"""Recurrent modules whose loops torch.jit.script keeps. (No future annotations: the compiler reads them.)"""

from typing import List, Tuple  # noqa: UP035 (what the compiler of torch knows)

import torch
from torch import Tensor, nn


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.r = nn.Linear(6, 64), nn.Linear(16, 64, bias=False)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        i, f, o, u = (self.w(x) + self.r(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
        return torch.sigmoid(o) * torch.tanh(c), c


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros(x.size(1), 16), torch.zeros(x.size(1), 16)
        out: List[Tensor] = []  # noqa: UP006
        for t in range(x.size(0)):
            h, c = self.cell(x[t], h, c)
            out.append(h)
        return torch.stack(out)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros(x.size(1), 16), torch.zeros(x.size(1), 16)
        out: List[Tensor] = []  # noqa: UP006
        for t in range(x.size(0)):
            h, c = self.cell(x[t], h, c)
            out.append(h)
        return torch.stack(out, 1)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros(x.size(1), 16), torch.zeros(x.size(1), 16)
        for t in range(x.size(0)):
            h, c = self.cell(x[t], h, c)
        return h


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.zeros(x.size(1), 16), torch.zeros(x.size(1), 16)
        out = torch.zeros(x.size(0), x.size(1), 16)
        for t in range(x.size(0)):
            h, c = self.cell(x[t], h, c)
            out[t] = h
        return out


class Greedy(nn.Module):
    """Decodes until a token comes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.embedding, self.out = Cell(), nn.Embedding(12, 6), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:  # noqa: UP006
        c = torch.zeros_like(x)
        token, score = torch.zeros(1, dtype=torch.long), torch.zeros(1)
        i, done = 0, False
        while i < 50 and not done:
            x, c = self.cell(self.embedding(token), x, c)
            logits = self.out(x)
            token = logits.argmax(1)
            score = score + logits.max(1)[0]
            if bool((token == 7).all()):
                done = True
            i += 1
        return x, score
