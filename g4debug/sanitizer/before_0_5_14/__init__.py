"""The checks that differ before 0.5.14. Nothing else imports them."""
