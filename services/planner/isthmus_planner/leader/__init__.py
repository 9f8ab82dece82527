"""Who may assign roles and rates: one planner at a time, by a lease."""
