"""Rewrites of the graph. `standard` has the ordered list of all passes, `pattern` rules as data, `base` the interface.
"""
