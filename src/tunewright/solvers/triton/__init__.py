"""Solvers whose kernels are written in Triton, as text: what a kernel is made for is in it as literals."""

#: The language of the kernels of all solvers here. Modules are not imported for devices that compile another one.
LANGUAGE = "cuda"
