"""One step as tensors, as the model's layers read it."""
