"""Service discovery: which tasks of a job clients may call. A task is listed once it was seen
healthy, and unlisted before it is told to stop. Clients wait for changes by revision.
"""
