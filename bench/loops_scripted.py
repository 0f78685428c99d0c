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


class Tokens(nn.Module):
    """A decoder that reads all tokens in each turn, with positions and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(200, 64), nn.Embedding(256, 64), nn.Linear(64, 200)
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, most: Tensor) -> Tensor:
        for _ in range(int(most)):
            t = x.size(1)
            h = self.words(x) + self.places(torch.arange(t))
            mask = torch.triu(torch.full((t, t), -1e9), 1)
            shares = torch.softmax(self.q(h) @ self.k(h).transpose(1, 2) / 8.0 + mask, -1)
            h = h + shares @ self.v(h)
            x = torch.cat([x, self.out(h[:, -1]).argmax(-1, keepdim=True)], 1)
        return x


class Keys(nn.Module):
    """A decoder whose keys and values grow."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(200, 64), nn.Linear(64, 200)
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, most: Tensor) -> Tensor:
        b = x.size(0)
        keys, values, tokens = torch.zeros(b, 2, 0, 32), torch.zeros(b, 2, 0, 32), x
        for _ in range(int(most)):
            h = self.words(x)
            q = self.q(h).view(b, 1, 2, 32).transpose(1, 2)
            keys = torch.cat([keys, self.k(h).view(b, 1, 2, 32).transpose(1, 2)], 2)
            values = torch.cat([values, self.v(h).view(b, 1, 2, 32).transpose(1, 2)], 2)
            shares = torch.softmax(q @ keys.transpose(2, 3) / 5.6, -1)
            h = h + (shares @ values).transpose(1, 2).reshape(b, 1, 64)
            x = self.out(h[:, -1]).argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, x], 1)
        return tokens


MOST = torch.tensor(20)
MODULES = {
    "Tokens": (Tokens, (torch.randint(0, 200, (1, 4)), MOST), {1: "t"}),
    "Keys": (Keys, (torch.randint(0, 200, (2, 1)), MOST), {0: "b"}),
    "Stacked": (Stacked, (torch.randn(9, 2, 40),), {0: "t", 1: "b"}),
    "Greedy": (Greedy, (torch.randn(1, 64),), {0: "b"}),
}
