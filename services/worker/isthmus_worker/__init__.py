"""What both workers stand on: engine host, relay attachment, heartbeats, step events."""
