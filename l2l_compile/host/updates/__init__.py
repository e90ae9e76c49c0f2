"""When a parameter is updated: the values of the option `update`, and what they share."""
