"""The opportunistic scheduler (the paper's Optimus, §7.2): best-effort work on lent machines.

Optimus is an application: a client of the front end with a store of its own. It may run as a Twine
job. It owns queues of work; the region owns machines, loans and tasks.
"""
