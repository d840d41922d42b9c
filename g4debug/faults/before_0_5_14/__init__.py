"""How faults are injected before 0.5.14. Nothing outside of such a folder imports it."""
