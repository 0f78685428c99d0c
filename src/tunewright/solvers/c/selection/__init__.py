"""Kernels that pick or interpolate elements: TopK, NonZero, NMS, Resize, sampling."""
