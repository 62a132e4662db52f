"""Layers whose own Python is replaced by fewer and larger kernels, where that proves to change nothing.

A model's code is still transformers' own. But a norm, a gated feed-forward layer or an attention layer that looks
like one of those here is run beside its replacement on the same inputs, and is replaced only if the results agree;
whatever looks or computes otherwise stays as it is. One file per kind: what it looks like, and what takes its place.
"""
