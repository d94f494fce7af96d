"""Advance notices to tasks: a file in each task that asks for it, a call of its hook."""
