"""Loops that are recurrent layers: what a Loop or Scan reads and counts, what its body computes, which cell that is.

From top to bottom: `reading` over `counts`, `cell_rows` over `rows`, `cell_match`, `proof`, which puts them together,
`build`, which makes the layers.
"""
