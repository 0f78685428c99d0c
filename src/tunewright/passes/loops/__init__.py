"""Loops that are recurrent layers: how a Loop or Scan reads and counts, what its body computes, and which cell that is.

From top to bottom: `reading` over `counts`, `cell_rows` over `rows`, `cell_match`, `proof`, which combines them, and
`build`, which makes the layers.
"""
