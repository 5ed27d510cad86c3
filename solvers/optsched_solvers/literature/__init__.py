"""What our own engines beat, kept to compare with."""
