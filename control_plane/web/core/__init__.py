"""Pure functions from answers of the API to what templates show."""
