"""What was recorded, summed up and drawn."""
