"""Where the catalog's records are kept. One journal = one file here + one inherited contract test."""
