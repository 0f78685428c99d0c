"""Integer convolutions and products, and conversions between integers and floats."""
