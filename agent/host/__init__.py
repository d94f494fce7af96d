"""The host as a whole: facts, usage, pressure, garbage, host profile, logs, installation."""
