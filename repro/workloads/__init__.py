"""What a script's variants run, each in a process of its own: a module of the script's name."""
