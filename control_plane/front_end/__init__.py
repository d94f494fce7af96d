"""The front end: the only entry. It finds out who calls, checks whether that caller may, and
translates; it decides nothing else. Routes are rows of one table.
"""
