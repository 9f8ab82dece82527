"""The data threads' inner loop outside Python, compiled by numba where that can be had.

It is a way to do what `transports.stream` does in Python, with the same bytes on the wire: a relay with it and one
without it understand each other.
"""
