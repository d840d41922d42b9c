"""Performance paths for SGLang before 0.5.14 only. Nothing else imports them."""
