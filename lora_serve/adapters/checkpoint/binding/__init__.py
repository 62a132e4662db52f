"""Every tensor of a checkpoint to its module in the base model, by names and shapes. No torch."""
