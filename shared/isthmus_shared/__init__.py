"""What every Isthmus process shares: ids, errors, messages, the bus port, KV forms, the engine port."""

__version__ = "0.1.0"
