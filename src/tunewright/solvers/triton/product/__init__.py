"""Products and convolutions on tensor cores, and products of few rows."""
