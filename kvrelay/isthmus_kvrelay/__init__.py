"""The KV relay: one daemon per node, its sans-IO core, its transports and the engine-side client."""
