"""Adapters on the model: from saved tensors to device slots and the layers that apply them."""
