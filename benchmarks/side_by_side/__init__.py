"""The same load against this server and its peers in one run, alternating: `python -m benchmarks.side_by_side`."""
