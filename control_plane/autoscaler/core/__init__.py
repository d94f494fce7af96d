"""What the autoscaler decides by: history, forecast, sizing, and their replay. Pure."""
