"""Precisions measured beside each other, and modules to pin."""
