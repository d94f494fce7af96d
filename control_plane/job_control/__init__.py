"""Job control: composes the intents of all writers into the state that the scheduler realizes."""
