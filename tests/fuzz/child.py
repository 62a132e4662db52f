"""The process in which a target is fuzzed: `python -m tests.fuzz.child TARGET FOUND [options of libFuzzer] FOLDER ...`.

An input that raises what the target must not raise is written to the folder FOUND, the first of each kind, and the
fuzzer goes on. One that hangs or ends the process is written there by libFuzzer, and ends it.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
import traceback
import warnings
from pathlib import Path

import atheris

EXCLUDED = [
    f"lora_serve.model.{name}" for name in ("attention", "fusion", "lora", "native", "pooling", "runner", "system")
]

with atheris.instrument_imports(include=["lora_serve", "zipfile", "http_sf"], exclude=EXCLUDED):
    from tests.fuzz.inputs import MAX_SECONDS, bounded_memory, target

    TARGET, FOUND = target(sys.argv[1]), Path(sys.argv[2])
KINDS: set[tuple[str, ...]] = set()


def one(data: bytes) -> None:
    began = time.process_time()
    try:
        TARGET(data)
        if (spent := time.process_time() - began) > MAX_SECONDS:
            raise TimeoutError(f"{spent:.1f} s of the processor")
    except Exception as error:
        places = traceback.extract_tb(error.__traceback__)[-2:]
        kind = (type(error).__name__, *(f"{place.filename}:{place.lineno}" for place in places))
        if kind not in KINDS:
            KINDS.add(kind)
            (FOUND / f"fault-{hashlib.sha256(data).hexdigest()[:12]}").write_bytes(data)
            traceback.print_exc()


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    mutate = TARGET.mutate
    own = (
        {} if mutate is None else {"custom_mutator": lambda data, most, seed: mutate(data, most, seed, atheris.Mutate)}
    )
    with bounded_memory():
        atheris.Setup([sys.argv[0], f"-artifact_prefix={FOUND}/", *sys.argv[3:]], one, **own)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
