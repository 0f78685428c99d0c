"""Loops, branches and data-dependent rows, inside a launch or interpreted by the request."""
