"""Calls of jobs' TaskControllers, which the scheduler asks before it acts, and their answers.

`controllers.py` keeps a conversation with each, `caller.py` makes the calls, `core/addresses.py`
restricts their addresses. `scheduler/core/approval.py` decides what is asked.
"""
