"""Every decision of the control plane, as pure functions of values: no clock, no I/O."""
