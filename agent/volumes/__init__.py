"""Volumes of tasks, and the mounts that are made before a task starts."""
