"""The booted lab, through public interfaces only."""
