"""Floor 4, decisions: which replica of a fleet answers a request.

Plain Python, beside `engine/`: neither knows the other. Gateways and the simulator ask the same routers. Nothing here
knows how a request reaches a replica.
"""
