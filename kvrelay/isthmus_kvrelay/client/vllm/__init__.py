"""The vLLM connector's parts (docs/adr/0007-vllm-connector.md). None of them imports vLLM; the shell does."""
