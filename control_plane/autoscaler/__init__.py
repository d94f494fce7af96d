"""The autoscaler (Service Resource Manager, §2.7 of the paper): a client of the front end.

`core` decides and is pure. `signals` and `prometheus` measure load, `sizes` writes sizes,
`stored_jobs` stores learnt state, `service` is the loop, `daemon` the program `twine-autoscaler`.
"""
