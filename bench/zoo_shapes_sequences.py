"""Small networks over sequences and indices with open sizes. `zoo_shapes.py` exports and checks them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo_shapes_torch import BATCH, DYNAMO, LEGACY, ROWS, N, calls, floats, ints, lengths, net, rows

# -- recurrent layers


@net(rows(6), ROWS)
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.RNN(6, 8, batch_first=True), nn.GRU(8, 8, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, h = self.b(self.a(x)[0])
        return y, h


@net({"x": floats("batch", "n", 6), "lengths": lengths("n", "batch")}, ROWS, exporters=(LEGACY,))
class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 8, batch_first=True, bidirectional=True), nn.Linear(16, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=True)
        y, (h, _) = self.rnn(packed)
        y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
        return self.head(y), h


@net({"x": floats("batch", "n", 6), "h": floats(1, "batch", 8), "c": floats(1, "batch", 8)}, ROWS)
class Streaming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.rnn(x, (h, c))
        return y[:, -1], h, c


@net({"a": ints(30, "batch", "n"), "b": ints(30, "batch", "m")}, {**ROWS, "m": N})
class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = (nn.GRU(8, 8, batch_first=True) for _ in range(2))
        self.words, self.mix, self.head = nn.Embedding(30, 8), nn.Linear(16, 8), nn.Linear(8, 30)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        keys, h = self.enc(self.words(a))
        y, _ = self.dec(self.words(b), h)
        seen = torch.softmax(torch.bmm(y, keys.transpose(1, 2)), -1) @ keys
        return self.head(torch.tanh(self.mix(torch.cat([seen, y], -1))))


class _Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.size(0), 6)
        outs: list[Tensor] = []
        for t in range(x.size(1)):
            h = torch.tanh(self.cell(torch.cat([x[:, t], h], 1))) + 0.1 * h
            outs.append(h)
        return torch.stack(outs, 1)


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if x.size(1) > 12:
            y = self.a(x[:, ::2])
        elif x.size(0) * 3 == x.size(1):
            y = self.b(x).flip(1)
        else:
            y = torch.cat([self.b(x), x], 1)
        return y.mean(1)


class _Until(nn.Module):
    """A loop that ends where the data says."""

    def forward(self, x: Tensor) -> Tensor:
        k = 0
        while k < x.size(1) - 1 and bool(x.abs().mean() > 0.05):
            x = x * 0.7
            k += 1
        return x[:, : k + 1]


net(rows(6), ROWS, exporters=(LEGACY,), script=True)(_Loop)
net(rows(6), ROWS, exporters=(LEGACY,), script=True)(_Branch)
net(rows(6), ROWS, exporters=(LEGACY,), script=True)(_Until)


@calls(rows(6), ROWS, exporters=(DYNAMO,), opset=18)
def cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.softmax(1) * 2, lambda x: x.cumsum(1), (x,))


@calls(rows(6), {"batch": (2, 3, 5), "n": (3, 5, 8, 13, 21)}, exporters=(DYNAMO,), opset=18)
def scan(x: Tensor) -> tuple[Tensor, Tensor]:
    from torch._higher_order_ops.scan import scan

    def step(h: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * 0.5 + v)
        return h, h * 2

    return scan(step, torch.zeros_like(x[:, 0]), x.transpose(0, 1).contiguous(), dim=0)


# -- attention


@net({"ids": ints(40, "batch", "n"), "lengths": lengths("n", "batch")}, ROWS)
class Encoder(nn.Module):
    """Masks from lengths, positions that are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.at = nn.Embedding(40, 16), nn.Embedding(100, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).unsqueeze(0)
        unused = places >= lengths.unsqueeze(1)
        y = self.layer(self.words(ids) + self.at(places), src_key_padding_mask=unused)
        y = y.masked_fill(unused.unsqueeze(-1), 0.0)
        return y.sum(1) / lengths.unsqueeze(1).clamp(min=1)


@net({"ids": ints(40, "batch", "n")}, ROWS)
class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(40, 16), nn.Linear(16, 48), nn.Linear(16, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        b, n, c = x.shape
        q, k, v = (p.view(b, n, 2, 8).transpose(1, 2) for p in self.qkv(x).split(c, -1))
        angle = torch.outer(torch.arange(n).float(), 1.0 / 100 ** (torch.arange(0, 8, 2).float() / 8))
        cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
        q, k = (p * cos + torch.cat([-p[..., 4:], p[..., :4]], -1) * sin for p in (q, k))
        late = torch.full((n, n), float("-inf")).triu(1)
        y = ((q @ k.transpose(2, 3)) / math.sqrt(8) + late).softmax(-1) @ v
        return self.head(F.rms_norm(y.transpose(1, 2).reshape(b, n, c), (c,)))


@net(rows(), {"batch": BATCH, "n": range(2, 60)})
class Buckets(nn.Module):
    """Relative positions in buckets whose width grows, as T5 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.q = nn.Embedding(16, 2), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        away = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        side, away = (away > 0).long() * 8, away.abs()
        far = 4 + (torch.log(away.float().clamp(min=1) / 4) / math.log(8) * 4).long()
        bias = self.bias(side + torch.where(away < 4, away, far.clamp(max=7))).permute(2, 0, 1)
        q = self.q(x).view(x.shape[0], n, 2, 8).transpose(1, 2)
        return ((q @ q.transpose(2, 3) + bias).softmax(-1) @ q).flatten(2)


@net(rows(), ROWS)
class Shifted(nn.Module):
    """Transformer-XL's shift: a pad, a view, a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.r = nn.Linear(16, 16), nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        at = torch.arange(n - 1, -n, -1).float().view(1, -1, 1) * self.r * 0.01
        scores = self.q(x) @ at.sin().transpose(1, 2)
        k = scores.shape[-1]
        scores = F.pad(scores, (1, 0)).view(b, k + 1, n)[:, 1:].reshape(b, n, k)[:, :, :n]
        return scores.softmax(-1) @ x


@calls({"q": floats("batch", "n", 2, 8), "k": floats("batch", "m", 2, 8)}, {**ROWS, "m": N})
def einsum(q: Tensor, k: Tensor) -> Tensor:
    weights = torch.einsum("bnhd,bmhd->bhnm", q, k).softmax(-1)
    return torch.einsum("bhnm,bmhd->bnhd", weights, k).flatten(2)


@net(rows(), ROWS)
class Latent(nn.Module):
    """A few learnt queries over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.cross = nn.Parameter(torch.randn(1, 4, 16)), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.cross(self.queries.expand(x.shape[0], -1, -1), x, x)
        return torch.cat([y.flatten(1), weights.mean(1).amax(-1, keepdim=True)], 1)


@net(rows(), ROWS)
class Chunks(nn.Module):
    """Attention within pieces of eight rows, of a padded sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        pieces = (n + 7) // 8
        x = F.pad(x, (0, 0, 0, pieces * 8 - n))
        q, k, v = self.qkv(x).view(b * pieces, 8, 3, c).unbind(2)
        return F.scaled_dot_product_attention(q, k, v).view(b, -1, c)[:, :n]


@net(rows(), ROWS)
class Linear(nn.Module):
    """Linear attention over running sums."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 8) for _ in "qkv")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1, self.v(x)
        both = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
        return (q.unsqueeze(-2) @ both).squeeze(-2) / ((q * k.cumsum(1)).sum(-1, keepdim=True) + 1e-3)


@net({"ids": ints(40, "batch", "n"), "k": floats("batch", 2, "past", 8), "v": floats("batch", 2, "past", 8)},
     {"batch": BATCH, "n": (1, 2, 3, 7, 16, 20), "past": (0, 1, 2, 5, 17, 33, 60)})  # fmt: skip
class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.head = nn.Embedding(40, 16), nn.Linear(16, 48), nn.Linear(16, 40)

    def forward(self, ids: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.words(ids)
        b, n, c = x.shape
        q, a, w = (p.view(b, n, 2, 8).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        k, v = torch.cat([k, a], 2), torch.cat([v, w], 2)
        m = k.shape[2]
        seen = torch.arange(m).unsqueeze(0) <= torch.arange(m - n, m).unsqueeze(1)
        y = (q @ k.transpose(2, 3) * 0.35).masked_fill(~seen, -1e9).softmax(-1) @ v
        return self.head(y.transpose(1, 2).reshape(b, n, c)), k, v


# -- sound


@net({"x": floats("batch", "n")}, {"batch": BATCH, "n": range(80, 400)})
class Spectrum(nn.Module):
    """Frames by a convolution over a reflected signal."""

    def __init__(self) -> None:
        super().__init__()
        self.basis, self.mel = nn.Conv1d(1, 34, 32, 16, bias=False), nn.Linear(17, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.basis(F.pad(x.unsqueeze(1), (16, 16), mode="reflect"))
        y = (y[:, :17] ** 2 + y[:, 17:] ** 2 + 1e-6).sqrt()
        y = torch.log(self.mel(y.transpose(1, 2)).abs() + 1e-3)
        return (y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True) + 1e-2)


@net({"x": floats("batch", 8, "n")}, {"batch": BATCH, "n": range(8, 90)})
class Causal(nn.Module):
    """Dilated convolutions that look back only, with gates."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(8, 16, 2, dilation=2**k) for k in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            a, b = layer(F.pad(x, (2**k, 0))).chunk(2, 1)
            x = x + torch.tanh(a) * torch.sigmoid(b)
        return x


@net({"x": floats("batch", 4, "n")}, {"batch": BATCH, "n": range(8, 90)})
class Upsampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.ConvTranspose1d(4, 8, 4, 2, 1), nn.Conv1d(8, 4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.leaky_relu(self.a(x)))
        return F.interpolate(y, size=x.shape[-1], mode="linear", align_corners=False) - x


@net({"x": floats("batch", "n", 16), "lengths": lengths("n", "batch")}, ROWS)
class Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.deep = nn.Conv1d(16, 32, 1), nn.Conv1d(16, 16, 5, padding=2, groups=16)
        self.norm, self.weigh = nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        used = (torch.arange(x.size(1))[None] < lengths[:, None]).unsqueeze(1)
        y = F.silu(self.norm(self.deep(F.glu(self.a(x.transpose(1, 2)), 1) * used)))
        weights = self.weigh(y.transpose(1, 2)).masked_fill(~used.transpose(1, 2), float("-inf")).softmax(1)
        mean = (weights * y.transpose(1, 2)).sum(1)
        return torch.cat([mean, ((weights * y.transpose(1, 2) ** 2).sum(1) - mean**2).clamp(min=1e-4).sqrt()], 1)


# -- indices and sizes


@calls({"x": floats("batch", "n", 6), "at": ints(2, "batch", "m")}, {**ROWS, "m": N})
def gathered(x: Tensor, at: Tensor) -> Tensor:
    rows = torch.gather(x, 1, at.unsqueeze(-1).expand(-1, -1, 6))
    return torch.cat([rows, F.one_hot(at, 4).float()], -1).flatten(1, 2)


@calls({"x": floats("n", 6), "to": ints(2, "e"), "of": ints(2, "e")}, {"n": N, "e": N})
def edges(x: Tensor, to: Tensor, of: Tensor) -> Tensor:
    """Messages along edges, added up at nodes."""
    found = torch.zeros_like(x).scatter_add(0, to.unsqueeze(1).expand(-1, 6), x[of])
    count = torch.zeros(x.shape[0]).scatter_add(0, to, torch.ones(to.shape[0]))
    return found / count.clamp(min=1).unsqueeze(1)


@calls(rows(6), ROWS)
def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 0
    y[:, -1:, 2:4] = y[:, :1, 2:4] + 1
    return torch.where(torch.arange(x.shape[1]).view(1, -1, 1) % 2 == 0, y, -y)


@calls(rows(6), ROWS)
def best_half(x: Tensor) -> tuple[Tensor, Tensor]:
    values, at = torch.topk(x, x.size(1) // 2, 1)
    return values, at


@calls(rows(6), ROWS)
def ordered(x: Tensor) -> tuple[Tensor, Tensor]:
    values, at = torch.sort(x, 1, descending=True)
    return values, torch.argsort(at, 1)


@calls({"x": floats("batch", "n")}, ROWS)
def chosen(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.nonzero(x > 0.3), x[x > 0.3].cumsum(0) * 2


@net(rows(6), ROWS)
class Kept(nn.Module):
    """A layer over the rows that the data chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        kept = x.reshape(-1, 6)
        kept = kept[kept[:, 0] > 0]
        return self.mix(kept) @ kept.transpose(0, 1)


@calls({"x": floats("batch", "n", 6), "times": ints(3, "n")}, ROWS)
def durations(x: Tensor, times: Tensor) -> Tensor:
    return torch.repeat_interleave(x, times + 1, dim=1).tanh()


@calls(rows(6), ROWS)
def repeated(x: Tensor) -> Tensor:
    y = torch.repeat_interleave(x, 3, dim=1)
    return y + x.repeat(1, 3, 1)


@calls(rows(6), ROWS)
def halves(x: Tensor) -> Tensor:
    n = x.size(1)
    a, b = torch.split(x, [n // 2, n - n // 2], 1)
    return torch.cat([b, a], 1) * (n % 3 + 1) + (n * 7 // 4 - x.size(0))


@calls(rows(6), {"batch": BATCH, "n": range(4, 50)})
def middle(x: Tensor) -> Tensor:
    q = x.shape[1] // 4
    return x[:, q : x.shape[1] - q].flip(1) + x[:, q : q + 1]


@calls({"x": floats("n", "n")}, {"n": N})
def diagonals(x: Tensor) -> Tensor:
    return x.tril(-1) @ x.triu(x.shape[0] // 2) + torch.eye(x.shape[0]) * x.shape[0]


@calls(
    {"x": floats("batch", "n", 3), "y": floats("batch", "m", 3)},
    {"batch": BATCH, "n": range(5, 40), "m": range(5, 40)},
)
def neighbours(x: Tensor, y: Tensor) -> Tensor:
    """The four nearest points, and what they are like."""
    away = ((x.unsqueeze(2) - y.unsqueeze(1)) ** 2).sum(-1)
    at = away.topk(4, largest=False)[1]
    near = torch.gather(y.unsqueeze(1).expand(-1, x.shape[1], -1, -1), 2, at.unsqueeze(-1).expand(-1, -1, -1, 3))
    return (near - x.unsqueeze(2)).amax(2)


@calls(rows(9), ROWS)
def beams(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, at = x.log_softmax(-1).flatten(1).topk(4, 1)
    return values, torch.div(at, 9, rounding_mode="floor"), at % 9


@calls({"x": floats("batch", "n", 6), "y": floats("batch", "m", 6)}, {**ROWS, "m": N})
def joined(x: Tensor, y: Tensor) -> Tensor:
    """Two lengths in one sequence, and apart again."""
    both = torch.cat([x, y], 1).softmax(1)
    return both[:, : x.size(1)].sum(1) - both[:, x.size(1) :].mean(1)


@calls({"x": floats("n", "m")}, {"n": (2, 3, 4, 6, 8), "m": (6, 12, 24, 30)})
def reshaped(x: Tensor) -> Tensor:
    """Views of views with arithmetic over sizes."""
    n, m = x.shape
    y = x.reshape(m // 2, 2, n).permute(1, 2, 0).reshape(n * 2, -1)
    y = y.reshape(-1, m // 3, 3).transpose(0, 1)
    return y.reshape(m // 6, -1) * (n * m // 6) - (n + m) // 2


@calls({"x": floats("batch", "n", "w")}, {**ROWS, "w": N})
def whole(x: Tensor) -> Tensor:
    """Normalised over sizes that are open."""
    y = F.layer_norm(x.flatten(1).unsqueeze(1), (1,)) + x.flatten(1).unsqueeze(1) / x.numel()
    return y.mean(-1) + F.normalize(x, dim=1).norm(dim=(1, 2), keepdim=False).unsqueeze(1) * x.shape[2] ** 0.5


@calls(
    {"x": floats("batch", 4, "n"), "w": floats("m", 4, 3)},
    {"batch": BATCH, "n": range(4, 40), "m": (1, 2, 3, 8, 16)},
)
def given_weights(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.conv1d(x, w, padding=1))


@calls({"x": floats("n", 6)}, {"n": N})
def single(x: Tensor) -> Tensor:
    """Sizes become values, and values become scalars."""
    n = torch.tensor(x.shape[0]) if not torch.jit.is_tracing() else torch.as_tensor(x.shape[0])
    return (x.sum() / n + n // 2).reshape(1).expand(x.shape[0])
