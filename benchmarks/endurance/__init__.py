"""What ten thousands of one thing do to a server: loads, registered adapters, uploads, idle streams."""
