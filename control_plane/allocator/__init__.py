"""The allocator: where a task goes. It keeps an index of the region, plans requests on it and
makes them durable, one record per job. Results are cached; machines come and go by two-phase commit
(paper §2.3).
"""
