"""The health check service: finds out which machines are alive.

It follows every agent, judges silence and records unavailability events at the broker. Many silent
machines at once suggest that this process is cut off.
"""
