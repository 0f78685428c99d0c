"""Kernels that move or resample elements."""
