"""POST /v1/messages: Anthropic's API, as a translation of a chat."""
