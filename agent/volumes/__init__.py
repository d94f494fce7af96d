"""Volumes of tasks, and what is mounted for a task before it starts."""
