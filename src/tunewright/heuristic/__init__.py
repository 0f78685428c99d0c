"""Gradient-boosted trees that predict fast candidates for problems that nobody measured.

`trees` predicts, `features` describes problems, `file` reads and writes, `train` and `regret` make and judge it.
"""
