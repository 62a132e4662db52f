"""A trained adapter as PEFT saved it: read by an allow-list, bound to the base model, loaded as tensors."""
