"""Adapters' own chat templates, which nobody trusts: rendered by processes with limits of time, memory and output."""
