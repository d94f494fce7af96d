"""The front end: the only entry. It identifies the caller, checks its rights, and translates; it
decides nothing else. Routes are rows of one table.
"""
