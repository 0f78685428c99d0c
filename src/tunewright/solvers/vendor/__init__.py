"""Solvers that call the vendor's libraries (cuDNN, cuBLAS, attention) through torch. They compete like any other
solver."""
