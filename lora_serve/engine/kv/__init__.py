"""The tables of KV blocks: on the device, known by prefix, and swapped to host memory."""
