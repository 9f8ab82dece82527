"""The relay's lanes over RDMA verbs: docs/adr/0003-verbs.md says how; `binding` is the one door to the libraries."""
