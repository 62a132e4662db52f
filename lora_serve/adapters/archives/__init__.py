"""Adapters as tar, tar.gz or zip."""
