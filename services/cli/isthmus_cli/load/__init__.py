"""`isthmus bench load`: load for any OpenAI-compatible server, and what it made of it."""
