"""Ends of detectors as they are written in PyTorch, as its exporter writes them."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch

Feeds = dict[str, np.ndarray]
#: of a box and of a class
SIZE, CLASSES = 64.0, 4


@torch.library.custom_op("detector_exports::nms", mutates_args=())
def nms(boxes: torch.Tensor, scores: torch.Tensor, overlap: float) -> torch.Tensor:
    """Torchvision's operator."""
    order, kept = scores.argsort(descending=True).tolist(), []
    for i in order:
        low, high = torch.maximum(boxes[i, :2], boxes[kept, :2]), torch.minimum(boxes[i, 2:], boxes[kept, 2:])
        inside = (high - low).clamp(min=0).prod(-1)
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
        if not bool((inside / (areas[i] + areas[kept] - inside) > overlap).any()):
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64)


def _nms_symbolic(g: Any, boxes: Any, scores: Any, overlap: float) -> Any:
    """As torchvision registers it."""
    from torch.onnx import symbolic_helper
    from torch.onnx.symbolic_opset11 import select, squeeze, unsqueeze

    overlap = symbolic_helper._get_const(overlap, "f", "overlap")
    boxes = unsqueeze(g, boxes, 0)
    scores = unsqueeze(g, unsqueeze(g, scores, 0), 0)
    most = g.op("Constant", value_t=torch.tensor([sys.maxsize], dtype=torch.long))
    least = g.op("Constant", value_t=torch.tensor([overlap], dtype=torch.float))
    found = g.op("NonMaxSuppression", boxes, scores, most, least)
    index = g.op("Constant", value_t=torch.tensor([2], dtype=torch.long))
    return squeeze(g, select(g, found, 1, index), 1)


def at_most(count: int, x: torch.Tensor) -> torch.Tensor:
    """The lesser of a count and the rows of a tensor, as torchvision traces it."""
    rows = torch._shape_as_tensor(x)[0].unsqueeze(0)
    return torch.min(torch.cat((torch.tensor([count], dtype=rows.dtype), rows), 0))


class Retina(torch.nn.Module):
    """Torchvision's RetinaNet and SSD: scores over a threshold, the best of them, suppressed for each class apart."""

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> Any:
        flat = scores.flatten()
        keep = torch.where(flat > 0.5)[0]
        best, order = flat[keep].topk(at_most(60, keep))
        at = keep[order]
        chosen, labels = boxes[torch.div(at, CLASSES, rounding_mode="floor")], at % CLASSES
        apart = labels.to(boxes) * (SIZE * 4)
        kept = torch.ops.detector_exports.nms(chosen + apart[:, None], best, 0.5)[:20]
        return chosen[kept], best[kept], labels[kept]


class Yolo(torch.nn.Module):
    """Ultralytics' non_max_suppression of one image: the best class of each box, centres to corners."""

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> Any:
        best, label = scores.max(1, keepdim=True)
        x = torch.cat((boxes, best, label.float()), 1)[best.view(-1) > 0.5]
        half = (x[:, 2:4] - x[:, :2]) / 2
        centre = x[:, :2] + half
        corners = torch.cat((centre - half, centre + half), 1)
        shifted = corners + x[:, 5:6] * (SIZE * 4)
        kept = torch.ops.detector_exports.nms(shifted, x[:, 4], 0.5)
        return torch.cat((corners, x[:, 4:]), 1)[kept[:20]]


class Frcnn(torch.nn.Module):
    """Torchvision's Faster R-CNN: thresholds, small boxes, suppression with offsets, the best of what stays."""

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> Any:
        best, labels = scores.softmax(-1).max(-1)
        inds = torch.where(best > 0.55)[0]
        boxes, best, labels = boxes[inds].clamp(min=0, max=SIZE), best[inds], labels[inds]
        wide, high = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
        keep = torch.where((wide >= 2) & (high >= 2))[0]
        boxes, best, labels = boxes[keep], best[keep], labels[keep]
        offsets = labels.to(boxes) * (SIZE + 1)
        keep = torch.ops.detector_exports.nms(boxes + offsets[:, None], best, 0.5)
        keep = keep[:20]
        return boxes[keep], best[keep], labels[keep]


class Detr(torch.nn.Module):
    """DETR and RT-DETR: the best of all queries and classes, then those over a threshold."""

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> Any:
        best, at = torch.topk(scores.sigmoid().flatten(), 30)
        chosen = boxes[torch.div(at, CLASSES, rounding_mode="floor")]
        keep = best > 0.6
        return chosen[keep], best[keep], (at % CLASSES)[keep]


class Peaks(torch.nn.Module):
    """CenterNet: peaks of a map, as many as there are, at most twenty, with what is in another map."""

    def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> Any:
        heat = scores.sigmoid()
        peak = torch.nn.functional.max_pool1d(heat.t()[None], 3, 1, 1)[0].t()
        at = ((heat == peak) & (heat > 0.62)).nonzero()
        values = heat[at[:, 0], at[:, 1]]
        best, order = values.topk(at_most(20, values))
        places = at[order]
        return torch.cat((boxes[places[:, 0]], best[:, None], places[:, 1:].float()), 1)


DETECTORS: dict[str, Callable[[], torch.nn.Module]] = {
    "retina": Retina, "yolo": Yolo, "frcnn": Frcnn, "detr": Detr, "peaks": Peaks,
}  # fmt: skip


def exported(name: str, count: int) -> onnx.ModelProto:
    """The model of a detector's end over so many boxes."""
    file, feed = io.BytesIO(), feeds(count, count)
    torch.onnx.register_custom_op_symbolic("detector_exports::nms", _nms_symbolic, 17)
    given = tuple(map(torch.from_numpy, feed.values()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            DETECTORS[name]().eval(), given, file, dynamo=False, input_names=[*feed], opset_version=17,
            custom_opsets={"detector_exports": 1},
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def feeds(count: int, found: int, seed: int = 0) -> Feeds:
    """Boxes of which some are found, far from each other or not."""
    rng = np.random.default_rng(seed)
    low, size = rng.uniform(0, SIZE - 24, (count, 2)), rng.uniform(4, 20, (count, 2))
    scores = rng.uniform(-2, -1, (count, CLASSES)).astype(np.float32)
    at = rng.permutation(count)[:found]
    scores[at, rng.integers(0, CLASSES, found)] = rng.uniform(0.6, 3, found)
    return {"boxes": np.concatenate([low, low + size], 1).astype(np.float32), "scores": scores}
