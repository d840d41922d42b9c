"""Makes a server's decisions again from its tape: SGLang's own scheduler, on the CPU engine.

`setting` reads from a dump which server to start, and `host` starts it. In its process `child`
gives the scheduler the requests on the tape (`feeder`), with tokens that are made of the hashes
(`tokens`). `verdict` compares the result with the dump.
"""
