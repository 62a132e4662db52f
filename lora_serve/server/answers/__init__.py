"""Answers: errors in OpenAI's form, large JSON, headers of every answer."""
