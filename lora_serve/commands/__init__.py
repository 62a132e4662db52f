"""Commands that are clients of a running server: the admin API from a terminal or a pipeline."""
