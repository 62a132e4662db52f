"""The routes that need no key: probes, metrics, documentation."""
