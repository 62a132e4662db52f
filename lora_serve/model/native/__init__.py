"""Kernels in C for CPUs, compiled on the machine that runs them; without a compiler torch's own operators serve.

`tile.h` holds the one product that all of them are made of. Each result is computed in one order whatever else is in
the batch, so a row's bits depend neither on its neighbours nor on how its prompt was cut into chunks.
"""
