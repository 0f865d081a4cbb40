"""Sessions: what runs steps under hooks."""
