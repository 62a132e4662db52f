"""Layers whose Python code is replaced by fewer and larger kernels, where that is proved to change no result.

A norm, a gated feed-forward layer or an attention layer that looks like one of the kinds in `kinds/` runs beside its
replacement on the same inputs, and is replaced only if the results agree; all other layers stay transformers' own code.
"""
