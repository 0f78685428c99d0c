"""Solvers whose kernels are written in Triton, as text: what a kernel is made for is in it as literals."""
