"""Operators of org.openvinotoolkit."""
