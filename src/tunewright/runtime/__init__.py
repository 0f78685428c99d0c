"""From an optimised graph to results: plans, control flow, requests, several devices, and what can be asked of them."""
