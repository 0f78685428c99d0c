"""What a model tells about itself: counters, timelines, memory, properties, and why each kernel was chosen."""
