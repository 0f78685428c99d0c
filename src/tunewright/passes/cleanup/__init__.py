"""Removes what has no effect: dead code, identities, constants, shape arithmetic that is known."""
