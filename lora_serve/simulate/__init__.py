"""The real scheduler in virtual time: a fleet of replicas whose runner only tells how long a step takes.

Every decision is made by the server's own code (`engine/engine.py`); the forward pass, the loads and the clock are
models. The simulator knows nothing of tensors, HTTP or text.
"""
