"""Counters, traces and log fields of requests."""
