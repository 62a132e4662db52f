"""Floor 2, weights: what an adapter's files must be, where they are kept, and how they come into host memory."""
