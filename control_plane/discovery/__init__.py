"""Service discovery: who may call a task. A task is listed once it was seen healthy, and
unlisted before it is told to stop. Clients wait for changes by revision.
"""
