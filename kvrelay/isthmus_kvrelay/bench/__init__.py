"""Measures the relay through its real processes: what `isthmus bench relay` and `bench/compare_transfer.py` run."""
