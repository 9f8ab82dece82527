"""Registry of the cluster and choice of routes."""
