"""Limits per minute and limits of concurrency, of tenants and of keys."""
