"""Parts that formats of reasoning share."""
