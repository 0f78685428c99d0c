"""Assigns layouts, precisions and views: how tensors lie in memory and in which type they are computed."""
