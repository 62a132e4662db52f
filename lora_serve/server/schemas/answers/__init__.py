"""Schemas of the routes' answers, for /openapi.json. Answers are checked against them in tests, not while serving."""
