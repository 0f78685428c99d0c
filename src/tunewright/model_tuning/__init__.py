"""Tuning of whole models within a budget, several models at a time, and tuning beside a model that serves."""
