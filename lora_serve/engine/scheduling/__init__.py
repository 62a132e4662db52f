"""The rows of each step: the scheduler and what it asks while it composes a batch."""
