"""The planner beside simple rules, on simulated engines: the same registry, estimates, routing and admission."""
