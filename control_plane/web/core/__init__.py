"""Pure functions from answers of the API to values for templates."""
