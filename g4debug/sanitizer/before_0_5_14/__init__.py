"""What SGLang before 0.5.14 cannot do. Nothing outside of such a folder imports it."""
