"""The relay's rules, sans-IO: events in, effects out, time an argument."""
