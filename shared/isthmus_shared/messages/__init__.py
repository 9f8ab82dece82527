"""Every message on the bus: one subject, one frozen message, one schema file (`schemas/`)."""
