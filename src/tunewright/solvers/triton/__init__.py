"""Solvers with Triton kernels as text. The text holds the problem's sizes and parameters as literals."""
