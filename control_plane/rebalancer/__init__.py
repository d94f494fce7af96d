"""The ReBalancer improves placements continuously, independently of the allocator (paper §2.3).

    survey -> solve (a process of its own) -> plan -> pace -> moves, by the scheduler

`core/survey.py` builds the model from the allocator's index, `core/search.py` and `core/bound.py`
solve it on numpy and HiGHS, `core/ordering.py` turns the answer into an executable plan,
`core/pacing.py` decides which of its moves begin. Nothing here holds a claim: without this
room the region works as before. Only the modules that `core/solving.py` imports need numpy.
"""
