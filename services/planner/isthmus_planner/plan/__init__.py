"""Which nodes should prefill, decode, or do both: a search over roles by closed forms, checked by simulation.

* `inputs`: the two files that an operator writes. `mix`: their requests as expectations.
* `capacity`: what one node sustains in each role within the targets. `search`: how many nodes take which role.
* `simulating`: the finalists as scenarios. `planning`: all of it together. `explain`: why.
* `html`, `charts`, `cluster_file`: what is written. Nothing here talks to a running cluster.
"""
