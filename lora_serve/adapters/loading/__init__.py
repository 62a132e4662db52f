"""Loading adapters from a store into host memory."""
