"""ONNX's own operators that move, pick, make, resample or quantise tensors."""
