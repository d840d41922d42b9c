"""Workloads that several scripts serve, their models, and children of their own."""
