"""Tasks: admission, one loop per task, its unit, commands inside it, probes."""
