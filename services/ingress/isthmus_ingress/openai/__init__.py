"""OpenAI's request and response shapes."""
