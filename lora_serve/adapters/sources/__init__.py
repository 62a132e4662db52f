"""Where an adapter's files may come from: one file per kind of source, and the table of them."""
