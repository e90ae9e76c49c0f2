"""The compiler passes."""
