"""Floor 1, words: frozen dataclasses, enums, the error tree, config. No torch, no aiohttp, no redis."""
