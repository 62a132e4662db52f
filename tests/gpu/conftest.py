"""Tests that need CUDA. They are not there on other machines, and nothing else runs with Triton compiled."""

from __future__ import annotations

import os

import torch

_CAN_RUN = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
collect_ignore_glob = [] if _CAN_RUN else ["test_*.py"]
