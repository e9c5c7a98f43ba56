"""What `boost` returns: wrappers of the user's objects."""
