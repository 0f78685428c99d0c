"""Rewrites of the graph. `standard` has the ordered list of passes, `pattern` rules as data, `base` the interface."""
