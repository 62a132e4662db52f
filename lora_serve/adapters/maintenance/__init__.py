"""An operator's tools for a whole registry: copy, back up, restore, check and rebuild."""
