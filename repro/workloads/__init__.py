"""What several scripts serve, the models that they write, and children of their own."""
