"""How chunks travel between relays: one port, tcp and shm behind it."""
