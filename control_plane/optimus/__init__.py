"""The opportunistic scheduler (the paper's Optimus, §7.2): best-effort work on lent machines.

It is an application: a client of the front end with a store of its own, which may run as a Twine
job. It owns queues of work; machines, loans and tasks are the region's.
"""
