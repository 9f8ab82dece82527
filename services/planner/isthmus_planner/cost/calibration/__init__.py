"""Constants from measurements: reading them, fitting with priors, and telling how far the result can be trusted."""
