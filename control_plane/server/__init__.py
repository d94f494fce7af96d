"""The front end: the only entry for CLI, UI and automation."""
