"""What each dashboard shows, as data."""
