"""The relay process."""
