"""The ops planner: work on machines, announced in waves, and judged before it is accepted.

Owns the plans. What a machine is told is an unavailability event at its broker; who runs tasks
there finds it in its record.
"""
