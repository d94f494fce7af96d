"""Every decision of the agent, as pure functions of values: no clock, no I/O."""
