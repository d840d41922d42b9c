"""prefix-cache: what a request hands to the prefix cache, and what that hands out again."""
