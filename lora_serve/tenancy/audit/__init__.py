"""The audit log: one durable line per admin act, shown by every replica."""
