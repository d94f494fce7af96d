"""Advance notices to tasks: a file inside each task that asks for it, and a call of its hook."""
