"""Only for a faster first step: without these files, the same programs take longer to make."""
