"""Regions as production has them, made up: `generator` makes machines, `workload` who uses them.

Pure and seeded: the same arguments give the same region, on every machine.
"""
