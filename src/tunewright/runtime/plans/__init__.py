"""Makes plans: choices of kernels, aliasing, memory layout, and templates for classes of shapes."""
