"""What every room asks: arguments, devices, versions, random states, private names of torch."""
