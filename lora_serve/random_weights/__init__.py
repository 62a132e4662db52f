"""Seeded checkpoints of random weights in named shapes: they cost what trained ones cost."""
