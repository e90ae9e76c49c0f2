"""The memory that a program needs, computed before anything runs."""
