"""Speculation: guesses of the tokens that come next, from a row's own prompt and answer, and how many of them pay."""
