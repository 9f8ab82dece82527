"""The engine-side client: a unix socket for control, the mapped pool for bytes."""
