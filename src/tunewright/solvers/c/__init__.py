"""Kernels in C, one text for the processor and OpenCL devices, by family. `source` holds what all families are written
with."""

#: The language of the kernels of all solvers here. Modules are not imported for devices that compile another one.
LANGUAGE = "c"
