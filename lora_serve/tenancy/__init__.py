"""Floor 5, doors: who calls (API key -> Caller), and what a tenant may see."""
