"""Kernels in C for devices that compile it at run time: today OpenCL."""
