"""Where the engine runs: one file per value of --engine, each with an `open_host` (see base.py)."""
