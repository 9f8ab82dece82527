"""What workers have in their prefix caches, as far as the planner knows."""
