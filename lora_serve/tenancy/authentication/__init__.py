"""Authentication: API key -> Caller."""
