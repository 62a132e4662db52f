"""Floor 6, web: aiohttp, wire <-> core. Never torch."""
