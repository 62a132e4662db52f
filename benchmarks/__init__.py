"""Measurements of this project, not installed with it: side_by_side against peers, and one module per question."""
