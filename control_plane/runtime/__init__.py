"""The base of all actors: time, randomness and threads, and durable tables with listeners.

It contains no concept of the paper. The simulated region has a runtime of its own.
"""
