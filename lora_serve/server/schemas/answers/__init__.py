"""What the routes answer, for /openapi.json. Nothing is checked against these while serving; the tests do it."""
