"""The words of the page ledger's books that a kernel reads.

They are apart from the books (:mod:`g4debug.ledger.shadow`, :mod:`g4debug.ledger.owners`), because
a guard that only checks ranges is armed without any book.
"""

from __future__ import annotations

FREE, HELD = -1, 0  # of the shadow: the page is free; it is held, and has no page of the SWA pool
EVERYTHING = 2**31 - 1  # of `protected`: it is not known how much the prefix cache holds
HIGH, LOW = 1 << 32, (1 << 32) - 1  # of the two halves of a word of the owners
