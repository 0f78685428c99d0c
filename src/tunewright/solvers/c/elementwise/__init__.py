"""Chains of element-wise operations, and tensors that are filled by a formula."""
