"""Element-wise chains and quantisation."""
