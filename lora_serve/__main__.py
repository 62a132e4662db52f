"""`python -m lora_serve` is `lora-serve`."""

from __future__ import annotations

import sys

from lora_serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
