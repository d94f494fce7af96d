"""The ReBalancer improves placements continuously, independently of the allocator (paper §2.3).

    survey -> solve (in a separate process) -> plan -> pace -> moves, by the scheduler

`core/survey.py` builds the model from the allocator's index, `core/search.py` and `core/bound.py`
solve it on numpy and HiGHS, `core/ordering.py` turns the answer into an executable plan,
`core/pacing.py` decides which of its moves begin. This room holds no claims, so the region works
without it. Only the modules that `core/solving.py` imports need numpy.
"""
