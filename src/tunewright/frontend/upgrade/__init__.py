"""Rewrites operators of older opsets in their newest form. `upgrade` applies the adapters of the other modules."""
