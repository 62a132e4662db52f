"""OpenAI's two generating APIs, with vLLM's additions."""
