"""The directory of tenants and API keys."""
