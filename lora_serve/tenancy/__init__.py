"""Floor 5, doors: who calls (API key -> Tenant), and what a tenant may see."""
