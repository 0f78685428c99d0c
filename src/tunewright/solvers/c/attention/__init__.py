"""Attention, rotary embeddings, and the append of rows to a key-value cache."""
