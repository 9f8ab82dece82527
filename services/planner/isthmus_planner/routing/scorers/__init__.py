"""What one plan costs, in seconds of somebody's waiting. A scorer a module, each a pure function of the request and
the seats; `total` puts them side by side.

These are the definition. `routing.columns` computes the same for all workers at once, and the tests hold it to this.
"""
