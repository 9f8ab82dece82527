"""The engine port and its adapters. One contract suite, which every adapter passes (tests/contract/engines)."""
