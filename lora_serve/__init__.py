"""lora_serve: one frozen base model, many tenants' LoRA adapters, one mixed-adapter batch."""

__version__ = "0.2.0"
