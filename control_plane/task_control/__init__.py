"""Calls to the TaskControllers of jobs, which approve the scheduler's operations.

`controllers.py` keeps a conversation with each, `caller.py` makes the calls, `core/addresses.py`
restricts their addresses. `scheduler/core/approval.py` decides what is asked.
"""
