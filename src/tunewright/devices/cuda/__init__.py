"""NVIDIA GPUs through torch: memory and streams (`device`), graphs (`graph`), and the driver (`driver`)."""
