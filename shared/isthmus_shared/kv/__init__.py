"""KV forms: the layout a worker keeps its cache in, the manifest it offers, the canonical form on the wire."""
