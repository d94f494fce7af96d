"""What every actor runs on: time, chance and threads, and tables of records that are durable and
tell who listens. Rooms above it hold decisions and actors; this one holds no word of the paper.
The simulated region brings a runtime of its own.
"""
