"""The tensors of a bound checkpoint: read, checked, converted to LoRA factors."""
