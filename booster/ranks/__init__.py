"""What the ranks of a job ask and tell each other."""
