"""What C kernels are written with: the emitter, expressions, epilogues, windows, strides and the prelude."""
