"""What users hold and run: compiled models, inference requests, streams and states."""
