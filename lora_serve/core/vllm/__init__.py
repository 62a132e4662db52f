"""Flags of `vllm serve`, so that its operators start this server with the line that they have."""
