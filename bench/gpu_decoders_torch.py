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
    forward, count = static(weights, layers, width, heads, most), [0]
    made = torch.compile(forward, mode="reduce-overhead", fullgraph=True)

    @torch.inference_mode()
    def step(token: int) -> Any:
        there, at = torch.tensor([[token]], device="cuda"), torch.tensor([count[0]], device="cuda")
        count[0] += 1
        return made(there, at).float().cpu().numpy()

    return step


class Graphed:
    """The compiled step in a CUDA graph that is recorded by hand: token and place have memory of their own."""

    def __init__(self, weights: dict[str, Any], layers: int, width: int, heads: int, most: int) -> None:
        made = torch.compile(static(weights, layers, width, heads, most), fullgraph=True)
        self._given = torch.zeros(2, dtype=torch.int64).pin_memory()
        self._there = torch.zeros(2, dtype=torch.int64, device="cuda")
        token, at = self._there[:1].view(1, 1), self._there[1:]
        self.stream, self._graph, self._count = torch.cuda.Stream(), torch.cuda.CUDAGraph(), 0
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            for _ in range(3):  # it writes place 0 of the cache, which the first token writes again
                made(token, at)
            self.stream.synchronize()
            with torch.cuda.graph(self._graph, stream=self.stream):
                self._logits = made(token, at).float()
            self._out = torch.empty(self._logits.shape, pin_memory=True)
        torch.cuda.synchronize()
        self.replay = self._graph.replay

    @torch.inference_mode()
    def __call__(self, token: int) -> Any:
        self._given[0], self._given[1] = token, self._count
        self._count += 1
        with torch.cuda.stream(self.stream):
            self._there.copy_(self._given, non_blocking=True)
            self._graph.replay()
            self._out.copy_(self._logits, non_blocking=True)
        self.stream.synchronize()
        return self._out.numpy().copy()


def static(weights: dict[str, Any], layers: int, width: int, heads: int, most: int) -> Callable[[Any, Any], Any]:
    """The network over a cache with room for all tokens: a token and its place."""
    model = Decoder(weights, layers, width, heads)
    dtype = model.w["words"].dtype
    shape = 1, heads, most, width // heads
    keys = [torch.zeros(shape, dtype=dtype, device="cuda") for _ in range(layers)]
    values = [torch.zeros(shape, dtype=dtype, device="cuda") for _ in range(layers)]
    places = torch.arange(most, device="cuda")

    def forward(token: Any, at: Any) -> Any:
        mask = (places <= at)[None, None, None, :]

        def attend(k: int, q: Any, key: Any, value: Any) -> Any:
            keys[k].index_copy_(2, at, key)
            values[k].index_copy_(2, at, value)
            return functional.scaled_dot_product_attention(q, keys[k], values[k], attn_mask=mask)

        return model(token, at, attend)

    return forward
