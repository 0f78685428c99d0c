"""What the GPU benchmark measures: a network by name and batch, as a module of torch, its inputs, and an ONNX file.

Names are ``network:batch``, and ``bert:batch x tokens``: resnet50:1, bert:32x128.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gpu_models as own

Arrays = dict[str, np.ndarray[Any, Any]]
#: an operator set whose forms every exporter of today writes
OPSET = 18
#: pictures that statistics of normalisations are taken over
SETTLING = 4


class Refused(Exception):
    """What was asked for cannot be done; says why."""


@dataclass(frozen=True)
class Network:
    """Definitions of a network, and what goes in and comes out."""

    #: makes ours, for a size of pictures
    make: Callable[[int], nn.Module]
    #: the same, small enough for an interpreter of kernels
    tiny: Callable[[int], nn.Module]
    outputs: tuple[str, ...]
    size: int = 224
    tiny_size: int = 32
    #: those of other packages: the package, and what makes it
    packages: tuple[tuple[str, Callable[[], nn.Module]], ...] = ()
    #: takes tokens, not pictures; of how many words
    words: int = 0


def torchvision(name: str) -> nn.Module:
    import torchvision.models

    made: nn.Module = getattr(torchvision.models, name)(weights=None)
    return made


def timm(name: str) -> nn.Module:
    import timm as package

    made: nn.Module = package.create_model(name, pretrained=False)
    return made


class Returned(nn.Module):
    """transformers' model with tuples for results, as an exporter and our own have them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.model(input_ids=ids, return_dict=False)
        return found[0], found[1]


def transformers_bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return Returned(BertModel(BertConfig(attn_implementation="sdpa")))


NETWORKS = {
    "resnet50": Network(
        lambda size: own.ResNet(), lambda size: own.ResNet((1, 1, 1, 1), 8, 10), ("logits",),
        packages=(("torchvision", partial(torchvision, "resnet50")), ("timm", partial(timm, "resnet50"))),
    ),
    "bert": Network(
        lambda size: own.Bert(), lambda size: own.Bert(2, 32, 2, 100), ("hidden", "pooled"),
        packages=(("transformers", transformers_bert),), words=30522,
    ),
    "yolo": Network(
        lambda size: own.Yolo(size=size), lambda size: own.Yolo(8, size, 3), ("boxes", "scores"), size=640,
        tiny_size=128,
    ),
    "unet": Network(lambda size: own.UNet(), lambda size: own.UNet(4), ("mask",), size=256),
    "efficientnet": Network(
        lambda size: own.EfficientNet(),
        lambda size: own.EfficientNet(((1, 3, 1, 4, 1), (6, 5, 2, 8, 2)), 8, 10), ("logits",),
        packages=(("torchvision", partial(torchvision, "efficientnet_b0")), ("timm", partial(timm, "efficientnet_b0"))),
    ),
}  # fmt: skip
TINY_WORDS = 100


@dataclass
class Case:
    """A network ready to be measured: single precision, normalisations folded, on the device that torch runs on."""

    name: str
    source: str
    model: nn.Module
    inputs: Arrays
    outputs: tuple[str, ...]

    def tensors(self, device: torch.device, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """The inputs where torch wants them; pictures with their channels last."""
        found = []
        for array in self.inputs.values():
            made = torch.from_numpy(array).to(device)
            found.append(made.to(dtype, memory_format=torch.channels_last) if made.dim() == 4 else made)
        return found

    def named(self, results: Any) -> Arrays:
        """Results of the module by the names of the outputs, in single precision."""
        parts = results if isinstance(results, tuple | list) else [results]
        return {n: r.detach().float().cpu().numpy() for n, r in zip(self.outputs, parts, strict=True)}

    @torch.no_grad()
    def expected(self, device: torch.device) -> Arrays:
        """The answer: single precision throughout, without tf32."""
        switches = (torch.backends.cudnn, torch.backends.cuda.matmul)
        before = [switch.allow_tf32 for switch in switches]
        try:
            for switch in switches:
                switch.allow_tf32 = False
            return self.named(self.model(*self.tensors(device)))
        finally:
            for switch, value in zip(switches, before, strict=True):
                switch.allow_tf32 = value


def parse(name: str, tiny: bool = False) -> tuple[Network, int, int]:
    """The network, its batch, and its size: of pictures, or the number of tokens."""
    kind, _, numbers = name.partition(":")
    if kind not in NETWORKS:
        raise Refused(f"there is no network {kind!r}; there are {', '.join(NETWORKS)}")
    network = NETWORKS[kind]
    batch, _, size = (numbers or "1").partition("x")
    usual = (8 if tiny else 128) if network.words else network.tiny_size if tiny else network.size
    try:
        found = int(batch), int(size or usual)
    except ValueError:
        raise Refused(f"{name!r}: a batch is a number, as in resnet50:8 or bert:8x128") from None
    if min(found) < 1:
        raise Refused(f"{name!r}: batch and size are 1 at least")
    if (kind == "yolo" and found[1] % 32) or (kind == "unet" and found[1] % 16):
        raise Refused(f"{name!r}: its pictures are multiples of {32 if kind == 'yolo' else 16} pixels wide")
    return network, *found


@torch.no_grad()
def make(name: str, device: torch.device, source: str = "own", tiny: bool = False, seed: int = 0) -> Case:
    """The network with random weights that are the same every time. ``source``: own, or packages where there are."""
    network, batch, size = parse(name, tiny)
    torch.manual_seed(seed)
    origin = "own"
    model: nn.Module | None = None
    for package, define in network.packages if source == "packages" and not tiny else ():
        if importlib.util.find_spec(package) is None:
            continue
        try:
            origin, model = package, define()
            break
        except Exception as error:  # a package that is there may still not fit to this torch
            print(f"  {package}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", file=sys.stderr)
    if model is not None:
        for module in model.modules():
            if isinstance(getattr(module, "bn3", None), nn.BatchNorm2d):
                nn.init.constant_(module.bn3.weight, own.BRANCH)
    if model is None:
        model = (network.tiny if tiny else network.make)(size)
    model = model.eval().to(device)
    if network.words:
        words = TINY_WORDS if tiny else network.words
        inputs: Arrays = {"ids": np.random.default_rng(seed).integers(0, words, (batch, size))}
        return Case(name, origin, model, inputs, network.outputs)
    own.settle(model, own.images(SETTLING, size, seed + 1).to(device))
    picture = own.images(batch, size, seed + 2)
    some = picture[:1].to(device)
    before = model(some)
    own.fold(model)
    _same(before, model(some))
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            module.to(memory_format=torch.channels_last)
    return Case(name, origin, model, {"x": picture.numpy()}, network.outputs)


def _same(before: Any, after: Any) -> None:
    """Folding has changed nothing: it trusts that modules run in the order in which they stand."""
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (before, after)), strict=True):
        worst = float((a - b).abs().max() / a.abs().max())
        if not worst < 1e-2:  # tf32 may be on
            raise Refused(f"folding the normalisations changed its outputs by {worst:.1%}")


def exporters() -> Sequence[bool]:
    """Values of torch.onnx.export's ``dynamo`` to try. The older exporter needs onnx alone, the other onnxscript."""
    return (False, True) if importlib.util.find_spec("onnxscript") is not None else (False,)


@torch.no_grad()
def export(case: Case, file: Path) -> str:
    """Write the network as ONNX; which exporter did it. On the processor, where exporters are at home."""
    model, cpu = copy.deepcopy(case.model).to("cpu"), torch.device("cpu")
    args = tuple(t.contiguous() for t in case.tensors(cpu))
    names = {"input_names": list(case.inputs), "output_names": list(case.outputs)}
    reasons = []
    for dynamo in exporters():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.onnx.export(model, args, str(file), opset_version=OPSET, dynamo=dynamo, **names)
            return "torch.export" if dynamo else "TorchScript"
        except Exception as error:  # of any kind: exporters raise what they like
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    raise Refused(f"it cannot be exported to ONNX: {'; '.join(reasons)}")
