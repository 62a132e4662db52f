"""The server as a program: what is opened, joined and closed, in which order; names the concrete classes."""
