"""Recognises attention, rotary embeddings and growing key-value caches, however exporters spell them."""
