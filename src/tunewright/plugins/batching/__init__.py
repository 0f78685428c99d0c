"""How many inferences to run together: streams, requests and batch sizes, by proof and by measurement."""
