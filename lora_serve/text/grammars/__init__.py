"""Structured output: what a caller asks for -> a grammar in the text form of `llguidance`, checked."""
