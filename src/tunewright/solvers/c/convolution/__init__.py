"""Convolutions: direct, Winograd, depthwise, grouped, transposed, of bytes."""
