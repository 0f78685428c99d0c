"""Solvers that call the vendor's libraries (cuDNN, cuBLAS, attention) through torch. They compete like any other
solver."""

#: The language of the kernels of all solvers here. Modules are not imported for devices that compile another one.
LANGUAGE = "cuda"
