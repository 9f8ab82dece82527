"""The operator's page: `pages` serves its files, `state` what it shows."""
