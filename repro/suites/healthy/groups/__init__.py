"""The workloads of ``repro/healthy.py``: what a healthy server is asked to do, group by group.

A module here holds workloads that belong together, in ``GROUPS``. The workloads of a group run one
after the other on the same engine.
"""
