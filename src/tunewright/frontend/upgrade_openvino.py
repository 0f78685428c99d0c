"""OpenVINO's layers that older exporters put into ONNX's own domain, in theirs."""

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
    """OpenVINO reads these names without a domain too."""
    return call.named(f"org.openvinotoolkit::{call.op}")
