"""The disk tier: parameters, optimizer state and stashes in files, moved by direct transfers, and files of the user that are read in place."""
