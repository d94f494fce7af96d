"""Whom the scheduler asks before it acts: calls of jobs' TaskControllers, and what they answered.

`controllers.py` keeps a conversation with each, `caller.py` makes the calls, `core/addresses.py`
says where these may go. What is asked is decided in `scheduler/core/approval.py`.
"""
