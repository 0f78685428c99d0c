"""Kernels in C, one text for the processor and OpenCL devices, by family. `source` holds what all families are written
with."""
