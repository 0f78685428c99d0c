"""References in numpy as kernels of last resort."""
