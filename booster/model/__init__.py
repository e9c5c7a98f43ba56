"""What is known of a user's modules, parameters and optimizers."""
