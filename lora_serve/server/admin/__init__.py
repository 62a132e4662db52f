"""The admin API: register, list, show, delete, residency, the engine's inside."""
