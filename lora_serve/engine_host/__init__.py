"""Where the engine runs: one file per value of --engine, each with `open_host` and `use_one_core` (see hosts/)."""
