"""What is done to a captured graph before it is cut."""
