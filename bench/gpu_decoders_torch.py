"""The decoder of gpu_decoders.py in torch: with a cache that torch.cat grows, and compiled over a static one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Step = Callable[[int], Any]


class Decoder:
    """The network with the ONNX model's weights."""

    def __init__(self, weights: dict[str, Any], layers: int, width: int, heads: int) -> None:
        floats = {name: array for name, array in weights.items() if array.dtype.kind == "f"}
        self.w = {name: torch.from_numpy(array.copy()).cuda() for name, array in floats.items()}
        self.layers, self.width, self.heads, self.each = layers, width, heads, width // heads

    def __call__(self, token: Any, at: Any, attend: Callable[[int, Any, Any, Any], Any]) -> Any:
        w, width = self.w, (self.width,)
        x = w["words"][token] + w["positions"][at]
        for k in range(self.layers):
            n = functional.layer_norm(x, width, w[f"g{k}s"], w[f"g{k}b"])
            q, key, value = ((n @ w[f"w{p}{k}"]).view(1, -1, self.heads, self.each).transpose(1, 2) for p in "qkv")
            mixed = attend(k, q, key, value).transpose(1, 2).reshape(1, -1, self.width)
            x = x + mixed @ w[f"wo{k}"]
            n = functional.layer_norm(x, width, w[f"h{k}s"], w[f"h{k}b"])
            x = x + torch.relu(n @ w[f"e{k}"]) @ w[f"i{k}"]
        return x @ w["head"]


def eager(weights: dict[str, Any], layers: int, width: int, heads: int) -> Step:
    model, cache = Decoder(weights, layers, width, heads), dict[int, Any]()

    def attend(k: int, q: Any, key: Any, value: Any) -> Any:
        if k in cache:
            key, value = torch.cat([cache[k][0], key], 2), torch.cat([cache[k][1], value], 2)
        cache[k] = key, value
        return functional.scaled_dot_product_attention(q, key, value)

    @torch.inference_mode()
    def step(token: int) -> Any:
        past = cache[0][0].shape[2] if cache else 0
        there = torch.tensor([[token]], device="cuda")
        return model(there, torch.tensor([past], device="cuda"), attend).float().cpu().numpy()

    return step


def compiled(weights: dict[str, Any], layers: int, width: int, heads: int, most: int) -> Step:
    model = Decoder(weights, layers, width, heads)
    dtype = model.w["words"].dtype
    shape = 1, heads, most, width // heads
    keys = [torch.zeros(shape, dtype=dtype, device="cuda") for _ in range(layers)]
    values = [torch.zeros(shape, dtype=dtype, device="cuda") for _ in range(layers)]
    places, count = torch.arange(most, device="cuda"), [0]

    def forward(token: Any, at: Any) -> Any:
        mask = (places <= at)[None, None, None, :]

        def attend(k: int, q: Any, key: Any, value: Any) -> Any:
            keys[k].index_copy_(2, at, key)
            values[k].index_copy_(2, at, value)
            return functional.scaled_dot_product_attention(q, keys[k], values[k], attn_mask=mask)

        return model(token, at, attend)

    made = torch.compile(forward, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def step(token: int) -> Any:
        there, at = torch.tensor([[token]], device="cuda"), torch.tensor([count[0]], device="cuda")
        count[0] += 1
        return made(there, at).float().cpu().numpy()

    return step
