"""Floor 4, decisions: plain Python, no torch. Tables of who owns which block and slot, and who runs next."""
