"""What each op does to abstract contents, by what it is about."""
