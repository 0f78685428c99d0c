"""Finds the operation that a decomposed subgraph computes, and puts that operation in its place."""
