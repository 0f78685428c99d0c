"""Sample inputs of ONNX's operators, on which every implementation is checked."""
