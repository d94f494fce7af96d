"""What every actor runs on: time, randomness and threads, and durable tables with listeners.

Rooms above it hold decisions and actors; this one holds no concept of the paper.
The simulated region has a runtime of its own.
"""
