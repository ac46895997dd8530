"""The services: accepting, computing, delivering, and reading what became of it."""
