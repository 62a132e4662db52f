"""Floor 5, a door: `EngineClient`, the seam between asyncio and the engine loop. One file per engine host."""
