"""What tasks are told ahead of time: a file in each task that asks for it, a call of its hook."""
