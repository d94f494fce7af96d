"""The ops planner: work on machines, announced in waves, and judged before it is accepted.

Owns the plans. It announces work on a machine as an unavailability event at the broker; the
schedulers read the event in the machine's record.
"""
