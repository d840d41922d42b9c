"""Healthy servers under production's workloads: engines, verdicts, the page."""
