"""Solvers that call the vendor's libraries (cuDNN, cuBLAS, attention) through torch: they compete like any other."""

#: The language of the kernels of all solvers here. Modules are not imported for devices that compile another one.
LANGUAGE = "cuda"
