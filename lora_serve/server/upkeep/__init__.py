"""Tasks that run for as long as the application does."""
