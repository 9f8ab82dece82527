"""The real services in virtual time under seeded faults: ingress, planner, workers and relays, unmodified, on one loop
whose clock jumps, with a bus and lanes in memory (docs/simulation.md)."""
