"""The real scheduler on made-up time: a fleet of replicas whose runner only says how long a step takes.

Everything that decides is what the server runs (`engine/build.py`); only the forward pass, the loads and the clock are
models. It knows nothing of tensors, HTTP or text.
"""
