"""Service discovery: which tasks of a job clients may call.

A task is listed once it was seen healthy, and unlisted before it gets its stop signal. Clients wait
for changes by revision.
"""
