"""Where HETERO runs each node: costs, search, measurement and stored results."""
