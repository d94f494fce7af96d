"""The decisions of the autoscaler: history, forecast, sizing, and their replay. Pure."""
