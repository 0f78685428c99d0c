"""What Triton kernels are written with, and how their text is compiled."""
