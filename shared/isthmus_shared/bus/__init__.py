"""The bus port, its NATS adapter and its in-memory one."""
