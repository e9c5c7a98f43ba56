"""What a run writes down of itself, and reads back."""
