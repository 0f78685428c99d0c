"""Networks of the GPU benchmark, in plain torch, with the layers of the originals and random weights.

ResNet-50 (v1.5), BERT-base, a YOLOv5s, a U-Net of four levels, an EfficientNet-B0: so the benchmark needs no package
but torch. `gpu_sources` takes torchvision's, timm's and transformers' definitions instead, where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: what the last normalisation of a residual branch has for a factor: in trained networks, too, branches add a little
BRANCH = 0.3


def unit(
    ins: int, outs: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: Callable[[], nn.Module] | None = None
) -> nn.Sequential:
    """A convolution, its normalisation and an activation."""
    conv = nn.Conv2d(ins, outs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outs), *([act()] if act is not None else []))


# ---- ResNet-50 ------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, ins: int, width: int, stride: int) -> None:
        super().__init__()
        outs = 4 * width
        self.body = nn.Sequential(
            unit(ins, width, act=nn.ReLU), unit(width, width, 3, stride, act=nn.ReLU), unit(width, outs)
        )
        nn.init.constant_(self.body[-1][1].weight, BRANCH)
        self.skip = unit(ins, outs, 1, stride) if stride > 1 or ins != outs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


class ResNet(nn.Module):
    """torchvision's resnet50: the stride is in the 3x3 convolution."""

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(unit(3, width, 7, 2, act=nn.ReLU), nn.MaxPool2d(3, 2, 1))
        blocks, ins = [], width
        for stage, depth in enumerate(depths):
            for k in range(depth):
                blocks.append(Bottleneck(ins, width << stage, 2 if stage and not k else 1))
                ins = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(ins, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1)
        return self.head(torch.flatten(x, 1))


# ---- BERT-base ------------------------------------------------------------------------------------------------------


class BertLayer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden, eps=1e-12), nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(split(self.query(x)), split(self.key(x)), split(self.value(x)))
        x = self.norm1(x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """transformers' BertModel without a mask: embeddings, layers, and the pooler."""

    def __init__(self, layers: int = 12, hidden: int = 768, heads: int = 12, vocabulary: int = 30522) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(vocabulary, hidden), nn.Embedding(2, hidden)
        self.positions = nn.Embedding(512, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.layers = nn.Sequential(*(BertLayer(hidden, heads) for _ in range(layers)))
        self.pooler = nn.Linear(hidden, hidden)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids) + self.types.weight[0] + self.positions.weight[: ids.shape[1]]
        x = self.layers(self.norm(x))
        return x, torch.tanh(self.pooler(x[:, 0]))


# ---- a YOLOv5s ------------------------------------------------------------------------------------------------------


class Crossed(nn.Module):
    """C3: half of the channels go through bottlenecks, the other half past them."""

    def __init__(self, ins: int, outs: int, depth: int, add: bool = True) -> None:
        super().__init__()
        half = outs // 2
        self.left, self.right = unit(ins, half, act=nn.SiLU), unit(ins, half, act=nn.SiLU)
        self.blocks = nn.ModuleList(
            nn.Sequential(unit(half, half, act=nn.SiLU), unit(half, half, 3, act=nn.SiLU)) for _ in range(depth)
        )
        if add:
            for block in self.blocks:
                nn.init.constant_(block[-1][1].weight, BRANCH)
        self.add, self.last = add, unit(2 * half, outs, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        y = self.left(x)
        for block in self.blocks:
            y = y + block(y) if self.add else block(y)
        return self.last(torch.cat((y, self.right(x)), 1))


class Pyramid(nn.Module):
    """SPPF: three poolings in a row, and all of them side by side."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.first, self.last = unit(ins, ins // 2, act=nn.SiLU), unit(2 * ins, outs, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for _ in range(3):
            found.append(F.max_pool2d(found[-1], 5, 1, 2))
        return self.last(torch.cat(found, 1))


#: of the three scales: sizes of anchors in pixels, and the stride
ANCHORS = (
    (8, ((10, 13), (16, 30), (33, 23))),
    (16, ((30, 61), (62, 45), (59, 119))),
    (32, ((116, 90), (156, 198), (373, 326))),
)


class Yolo(nn.Module):
    """YOLOv5s: backbone, two ways through the pyramid, and boxes decoded as its export does. Boxes and scores are two
    outputs, since they are compared each by their own scale."""

    def __init__(self, width: int = 32, size: int = 640, classes: int = 80) -> None:
        super().__init__()
        w, n = width, 5 + classes
        self.stem = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, w, 6, 2, 2, bias=False), nn.BatchNorm2d(w), nn.SiLU()),
            unit(w, 2 * w, 3, 2, act=nn.SiLU), Crossed(2 * w, 2 * w, 1), unit(2 * w, 4 * w, 3, 2, act=nn.SiLU),
            Crossed(4 * w, 4 * w, 2),
        )  # fmt: skip
        self.middle = nn.Sequential(unit(4 * w, 8 * w, 3, 2, act=nn.SiLU), Crossed(8 * w, 8 * w, 3))
        self.deep = nn.Sequential(
            unit(8 * w, 16 * w, 3, 2, act=nn.SiLU), Crossed(16 * w, 16 * w, 1), Pyramid(16 * w, 16 * w)
        )
        self.up1, self.up2 = unit(16 * w, 8 * w, act=nn.SiLU), unit(8 * w, 4 * w, act=nn.SiLU)
        self.in1, self.in2 = Crossed(16 * w, 8 * w, 1, add=False), Crossed(8 * w, 4 * w, 1, add=False)
        self.down1, self.down2 = unit(4 * w, 4 * w, 3, 2, act=nn.SiLU), unit(8 * w, 8 * w, 3, 2, act=nn.SiLU)
        self.out1, self.out2 = Crossed(8 * w, 8 * w, 1, add=False), Crossed(16 * w, 16 * w, 1, add=False)
        self.heads = nn.ModuleList(nn.Conv2d(c * w, 3 * n, 1) for c in (4, 8, 16))
        for head in self.heads:
            nn.init.normal_(head.weight, std=0.01)  # as detectors begin: scores far from 0 and 1
        self.numbers = n
        for k, (stride, anchors) in enumerate(ANCHORS):
            side = size // stride
            rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
            grid = torch.stack((columns, rows), 2).view(1, 1, side, side, 2) - 0.5
            self.register_buffer(f"grid{k}", grid.float())
            self.register_buffer(f"anchor{k}", torch.tensor(anchors).float().view(1, 3, 1, 1, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        high = self.stem(x)
        middle = self.middle(high)
        low = self.up1(self.deep(middle))
        first = self.up2(self.in1(torch.cat((F.interpolate(low, scale_factor=2.0, mode="nearest"), middle), 1)))
        top = self.in2(torch.cat((F.interpolate(first, scale_factor=2.0, mode="nearest"), high), 1))
        second = self.out1(torch.cat((self.down1(top), first), 1))
        last = self.out2(torch.cat((self.down2(second), low), 1))
        boxes, scores = [], []
        for k, (head, y) in enumerate(zip(self.heads, (top, second, last), strict=True)):
            stride, grid, anchor = ANCHORS[k][0], getattr(self, f"grid{k}"), getattr(self, f"anchor{k}")
            batch, _, rows, columns = y.shape
            found = head(y).view(batch, 3, self.numbers, rows, columns).permute(0, 1, 3, 4, 2).sigmoid()
            where, extent, score = found.split((2, 2, self.numbers - 4), 4)
            box = torch.cat(((where * 2 + grid) * stride, (extent * 2) ** 2 * anchor), 4)
            boxes.append(box.reshape(batch, -1, 4))
            scores.append(score.reshape(batch, -1, self.numbers - 4))
        return torch.cat(boxes, 1), torch.cat(scores, 1)


# ---- a U-Net --------------------------------------------------------------------------------------------------------


def pair(ins: int, outs: int) -> nn.Sequential:
    return nn.Sequential(unit(ins, outs, 3, act=nn.ReLU), unit(outs, outs, 3, act=nn.ReLU))


class UNet(nn.Module):
    """Four levels down, transposed convolutions up, as the one for brain scans of torch's hub (256 x 256)."""

    def __init__(self, width: int = 32, levels: int = 4) -> None:
        super().__init__()
        sizes = [width << k for k in range(levels + 1)]
        self.down = nn.ModuleList(pair(a, b) for a, b in zip([3, *sizes], sizes[:-1], strict=False))
        self.bottom = pair(sizes[-2], sizes[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in sizes[-2::-1])
        self.up = nn.ModuleList(pair(2 * c, c) for c in sizes[-2::-1])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level in self.down:
            kept.append(level(x))
            x = F.max_pool2d(kept[-1], 2, 2)
        x = self.bottom(x)
        for grow, level in zip(self.grow, self.up, strict=True):
            x = level(torch.cat((grow(x), kept.pop()), 1))
        return torch.sigmoid(self.head(x))


# ---- EfficientNet-B0 ------------------------------------------------------------------------------------------------


class Squeeze(nn.Module):
    """Squeeze and excite: a factor for each channel."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    def __init__(self, ins: int, outs: int, expand: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = ins * expand
        first = [unit(ins, wide, act=nn.SiLU)] if expand > 1 else []
        self.body = nn.Sequential(
            *first, unit(wide, wide, kernel, stride, wide, nn.SiLU), Squeeze(wide, max(1, ins // 4)), unit(wide, outs)
        )
        self.add = stride == 1 and ins == outs
        if self.add:
            nn.init.constant_(self.body[-1][1].weight, BRANCH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.add else self.body(x)


#: expansion, kernel, stride, channels, how often
STAGES = (
    (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)  # fmt: skip


class EfficientNet(nn.Module):
    """torchvision's efficientnet_b0."""

    def __init__(self, stages: Sequence[tuple[int, ...]] = STAGES, stem: int = 32, classes: int = 1000) -> None:
        super().__init__()
        ins, last = stem, 4 * stages[-1][3]
        layers: list[nn.Module] = [unit(3, stem, 3, 2, act=nn.SiLU)]
        for expand, kernel, stride, outs, depth in stages:
            for k in range(depth):
                layers.append(Inverted(ins, outs, expand, kernel, 1 if k else stride))
                ins = outs
        self.body = nn.Sequential(*layers, unit(ins, last, act=nn.SiLU))
        self.head = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.body(x), 1), 1))


# ---- weights that make sense ----------------------------------------------------------------------------------------


def images(batch: int, size: int, seed: int) -> Tensor:
    """Pictures with something in them at every scale, as real ones have: of plain noise deep layers see only grey."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.zeros(batch, 3, size, size)
    side = 2
    while side <= size:
        part = torch.randn(batch, 3, side, side, generator=generator)
        found += F.interpolate(part, size=(size, size), mode="bilinear", align_corners=False)
        side *= 2
    return found / found.std()


@torch.no_grad()
def settle(model: nn.Module, inputs: Tensor) -> None:
    """Statistics of normalisations from a pass over data. With those of a new network numbers would grow or vanish from
    layer to layer; with the exact ones rounding would grow instead, since half of what a layer of random weights makes
    is a constant that is taken off again. So half of the mean stays, and no channel is blown up beside the others."""

    def measure(norm: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, nn.BatchNorm2d)
        mean, variance = given[0].mean((0, 2, 3)), given[0].var((0, 2, 3))
        found = variance + (mean / 2) ** 2
        norm.running_mean, norm.running_var = mean / 2, found.clamp(min=float(found.mean()))

    model.eval()
    hooks = [m.register_forward_pre_hook(measure) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    if hooks:
        model(inputs)
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def fold(model: nn.Module) -> int:
    """Put normalisations into the convolutions in front of them, in place; how many there were."""
    count = 0
    for parent in model.modules():
        before: tuple[str, nn.Module] | None = None
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d) and before is not None and isinstance(before[1], nn.Conv2d):
                setattr(parent, before[0], nn.utils.fusion.fuse_conv_bn_eval(before[1], child))
                setattr(parent, name, getattr(child, "act", nn.Identity()))  # timm's have an activation inside
                count += 1
            before = name, child
    return count
