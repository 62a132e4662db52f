"""The guards before the handlers: keys, pages of other sites; and the audit line of each admin act."""
