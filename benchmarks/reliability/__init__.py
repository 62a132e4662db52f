"""Races, storms and a soak: what the server withstands."""
