"""How the device's memory is measured and shared out between weights, KV cache, adapters and activations."""
