"""The parts of scripts/bench.py: checkpoints, workload, load over HTTP, the PEFT baseline, the report."""
