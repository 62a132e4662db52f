"""Commands from a terminal or a pipeline: clients of a running server's admin API, and work on a registry itself."""
