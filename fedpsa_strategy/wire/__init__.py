"""What travels: Flower's records on one side, flat vectors on the other."""
