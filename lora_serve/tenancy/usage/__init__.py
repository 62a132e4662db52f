"""Usage per tenant, adapter and key: counted, kept, shared among replicas."""
