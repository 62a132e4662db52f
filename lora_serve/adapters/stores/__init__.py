"""Where adapter files are kept, content-addressed. One store = one file here + one inherited contract test."""
