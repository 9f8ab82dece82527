"""The real services in virtual time beside the planner's simulator, on the same laws of the same hardware."""
