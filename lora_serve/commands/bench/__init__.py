"""`lora-serve bench`: load on any server that speaks OpenAI's HTTP API, and what came of it."""
