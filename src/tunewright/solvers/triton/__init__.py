"""Solvers with Triton kernels as text. The text holds the problem's sizes and parameters as literals."""

#: The language of the kernels of all solvers here. Modules are not imported for devices that compile another one.
LANGUAGE = "cuda"
