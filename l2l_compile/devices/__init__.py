"""What runs a program: lanes with events, copies, weight slabs."""
