"""Images that behave like the usual public ones, built from packages and run on a guest."""
