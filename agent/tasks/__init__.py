"""Tasks: their admission, the loop of each task, its unit, commands inside it, and its probes."""
