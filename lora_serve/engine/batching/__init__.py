"""How large a step may be and when it starts: limits, learned step cost, latency targets."""
