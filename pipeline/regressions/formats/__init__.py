"""What a check found, in the formats that continuous integration shows."""
