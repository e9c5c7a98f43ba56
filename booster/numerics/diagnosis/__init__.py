"""A bad step, replayed under watch."""
