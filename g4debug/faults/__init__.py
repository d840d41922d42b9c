"""One file per fault; grammar.py reads G4DEBUG_FAULTS, base.py is what a fault declares."""
