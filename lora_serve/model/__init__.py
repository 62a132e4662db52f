"""Floor 3, maths: torch. Pools of bytes and pure computation; no opinions about who runs when."""
