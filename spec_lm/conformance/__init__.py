"""How an implementation is checked."""
