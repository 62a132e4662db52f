"""Real clients, each in an environment of its own, against a server on the demo model: `scripts/clients`."""
