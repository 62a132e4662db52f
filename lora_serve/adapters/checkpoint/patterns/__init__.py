"""Regular expressions of PEFT's configs, matched within bounded time."""
