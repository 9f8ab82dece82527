"""A simulator of a whole cluster: nodes, relays, queues and requests, from one completion to the next."""
