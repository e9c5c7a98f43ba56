"""Parallel training beside raw torch: time, bytes sent, memory, growth, waits and bubbles."""
