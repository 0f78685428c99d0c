"""From a model file to the IR, and back.

`onnx` parses, `guard` bounds what a file may ask for, `upgrade` rewrites old operators, `export` writes ONNX.
"""
