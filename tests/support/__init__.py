"""What tests share; they import nothing from one another."""
