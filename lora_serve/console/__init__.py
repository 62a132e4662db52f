"""The console: the live view's data, and the page."""
