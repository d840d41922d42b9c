"""Makes a server's decisions again from its tape: SGLang's own scheduler, on the CPU engine.

`setting` says from a dump what to start, `host` starts it, and in its process `child` gives the
scheduler what was on the tape (`feeder`), with tokens that are made of the hashes (`tokens`).
`verdict` compares what came of it with the dump.
"""
