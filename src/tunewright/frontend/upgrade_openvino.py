"""Moves OpenVINO's layers, which older exporters put into ONNX's domain, to OpenVINO's domain."""

from __future__ import annotations

from ..ir.graph import Graph
from .upgrade_base import ALWAYS, Call, adapter

LEGACY = (
    "DeformableConv2D",
    "DetectionOutput",
    "ExperimentalDetectronDetectionOutput",
    "ExperimentalDetectronGenerateProposalsSingleImage",
    "ExperimentalDetectronGroupNorm",
    "ExperimentalDetectronPriorGridGenerator",
    "ExperimentalDetectronROIFeatureExtractor",
    "ExperimentalDetectronTopKROIs",
    "FakeQuantize",
    "GenerateProposals",
    "GroupNorm",
    "Normalize",
    "PriorBox",
    "PriorBoxClustered",
)


@adapter(ALWAYS, *LEGACY)
def openvino_domain(graph: Graph, call: Call) -> Call:
    """Add OpenVINO's domain, as OpenVINO does for these names."""
    return call.named(f"org.openvinotoolkit::{call.op}")
