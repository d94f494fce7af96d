"""The scheduler: what happens to a task next. It turns what owners want and what machines
say into operations within one availability budget per job, and carries them out. Job control,
plans and explanations are here, too: all that is asked about a job.
"""
