"""Who may enter: keys, pages of other sites, the served task; and the audit line of each admin act."""
