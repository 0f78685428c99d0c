"""Conformance suites for extensions: checks of operators, kernels, strategies and databases."""
