"""Rewrites loops, branches and scans: trip counts, unrolling, hoisting."""
