"""The graph and what it consists of: types, values, nodes, symbolic sizes, and the rules of a legal graph."""
