"""The console's routes."""
