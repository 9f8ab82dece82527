"""The isthmus command."""
