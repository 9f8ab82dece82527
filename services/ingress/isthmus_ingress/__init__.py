"""The front doors (HTTP and NATS) and the request saga."""
