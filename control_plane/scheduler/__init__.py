"""The scheduler decides what happens to a task next.

It turns the requests of owners and the reports of machines into operations within one availability
budget per job, and carries them out. Job control, plans and explanations of jobs are here, too.
"""
