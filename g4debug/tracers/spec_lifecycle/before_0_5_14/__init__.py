"""spec-lifecycle before 0.5.14: the v1 worker, and 0.5.12's v2. Nothing else imports it."""
