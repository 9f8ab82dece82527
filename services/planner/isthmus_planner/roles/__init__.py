"""Which worker has which role and model, and the ceilings of the lanes between them. Pure but for `loop`."""
