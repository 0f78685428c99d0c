"""The hardware: devices link a plan into one executable and run it. `base` and `executable` are the interfaces.

`native` is the processor, `cuda` NVIDIA GPUs, `opencl` OpenCL devices, `host` numpy, `null` a scripted clock for tests.
"""
