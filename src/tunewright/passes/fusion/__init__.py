"""Merges neighbouring operations into one kernel."""
