"""The workers as SGLang has them before 0.5.14. Nothing else imports them."""
