"""Calls to the TaskControllers of jobs, which approve the scheduler's operations.

`controllers.py` has the conversation with each controller, `caller.py` makes the calls, and
`core/addresses.py` restricts their addresses. `scheduler/core/approval.py` decides what is asked.
"""
