"""Solvers that call the vendor's libraries (cuDNN, cuBLAS, attention) through torch: they compete like any other."""
