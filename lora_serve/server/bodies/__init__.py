"""Request bodies: read to their ends, decoded, parsed and checked."""
