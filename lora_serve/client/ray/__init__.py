"""The client of a fleet: engines on Ray, one link to each. Ray itself is known to `serve_transport.py` and
`request_router.py` alone, so that all else is tested without it.
"""
