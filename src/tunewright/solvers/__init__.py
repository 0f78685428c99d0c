"""What can be chosen: a solver turns a problem into a kernel. `base` is the interface.

`c` (CPU and OpenCL), `triton` and `vendor` (NVIDIA GPUs), `host` (numpy references), `custom` (a user's own kernels).
"""
