"""Who sent a request: API key -> Caller."""
