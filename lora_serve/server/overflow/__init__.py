"""Requests that would wait here for long go to neighbours: which of them, to whom, and what comes back."""
