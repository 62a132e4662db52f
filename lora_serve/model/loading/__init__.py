"""Loads a frozen transformers model: its checks, its observation, its quantisation, its weights as they lie."""
