"""Moves OpenVINO's layers, which older exporters put into ONNX's domain, to OpenVINO's domain."""

from __future__ import annotations

from tunewright.ir.graph import Graph

from .base import ALWAYS, OperatorCall, adapter

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
def openvino_domain(graph: Graph, call: OperatorCall) -> OperatorCall:
    """Add OpenVINO's domain, as OpenVINO does for these names."""
    return call.named(f"org.openvinotoolkit::{call.op}")
