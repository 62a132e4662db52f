"""Where the engine runs: one file per value of --engine, each with an `open_host` and a `stand_aside` (see base.py)."""
