"""Reductions, normalisations, softmax, pooling."""
