"""What is judged in another way before 0.5.14. Nothing else imports it."""
