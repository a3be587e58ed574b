"""How fast, how much memory, how it grows, how far from the machine's limit: figures only beside clauses that hold."""
