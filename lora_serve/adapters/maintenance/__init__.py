"""What an operator does to a whole registry: copy, back up, restore, check and rebuild it."""
