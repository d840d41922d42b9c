"""Fixes for bugs that SGLang has before 0.5.14 only. Nothing else imports them."""
