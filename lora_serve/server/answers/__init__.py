"""What goes back: errors in OpenAI's form, JSON, headers."""
