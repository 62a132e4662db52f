"""The way of an adapter from a store into host memory."""
