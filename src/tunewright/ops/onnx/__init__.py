"""ONNX's own operators that compute: one module for each family. `tensors` has those that move and make tensors."""
