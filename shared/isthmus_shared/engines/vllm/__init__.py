"""vLLM behind the engine port. Only `core` and `sampler` import vLLM, and only when a vLLM engine is started."""
