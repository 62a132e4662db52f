"""Parts that formats of tool calls share: reading text that comes in pieces, JSON and Python values, grammars."""
