"""How faults are injected before 0.5.14. Nothing else imports it."""
