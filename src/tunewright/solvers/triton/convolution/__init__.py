"""Depthwise and transposed convolutions; the others are products (`solvers.triton.product`)."""
