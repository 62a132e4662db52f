"""Which adapters there are, which version an id means, and where that is written down so that it survives."""
