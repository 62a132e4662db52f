"""The tables of adapters: device slots, residency in host memory, and requests whose adapters are cold."""
