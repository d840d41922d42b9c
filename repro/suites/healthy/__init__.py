"""Healthy servers do what production does: workloads, engines, verdicts, the page."""
