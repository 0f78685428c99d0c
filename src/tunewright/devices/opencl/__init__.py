"""OpenCL devices through pyopencl: discovery, memory, programs and the executable that enqueues kernels."""
