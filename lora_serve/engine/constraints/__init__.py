"""Sequences whose output obeys a grammar: the seam to whoever knows grammars, and what a step asks of it."""
