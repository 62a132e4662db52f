"""Measurements of this project, not installed with it: side_by_side against peers, and one module per question.

Libraries are told to be quiet before they are imported: what a benchmark prints is its own.
"""

import logging
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars too
for name in ("torchao", "torch.utils._pytree"):  # about kernels for other machines
    logging.getLogger(name).setLevel(logging.ERROR)
