"""How chunks travel between relays: one port; tcp, verbs and shm behind it."""
