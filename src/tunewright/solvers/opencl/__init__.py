"""Kernels in C, for devices that compile C or OpenCL C at run time."""
