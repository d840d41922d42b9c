"""The faults, one file each.

grammar.py reads G4DEBUG_FAULTS. base.py has what a fault declares, and its injection.
"""
