"""flight-recorder: saves the last steps when the scheduler dies or hangs."""
