"""What lets other libraries' training loops run under a precision and a plugin of this one; the core reads none of it."""
