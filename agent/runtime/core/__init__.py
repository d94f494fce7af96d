"""Records of tasks, and the names that follow from a specification; pure."""
