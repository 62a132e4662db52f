"""Everything at once on each engine host: checked answers while adapters, tenants and engines come and go."""
