"""Connections: who may open one, how it is listened for, served and ended."""
