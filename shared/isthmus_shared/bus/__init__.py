"""The bus port (`port`), its NATS adapter (`nats`), its in-memory one (`memory`) and a server to embed (`server`)."""
