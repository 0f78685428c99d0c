"""Matrix products: tiles, single rows, bytes, weights of a few bits."""
