"""Reductions, normalisations, softmax, pooling and running sums."""
