"""Decisions about images and roots; pure."""
