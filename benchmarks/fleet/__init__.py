"""What a fleet withstands and costs: servers with `--engine ray` beside those of one engine, over HTTP."""
