"""Synthetic regions like those of production: `generator` makes machines, `workload` their users.

Pure and seeded: the same arguments give the same region, on every machine.
"""
