"""Registry of known models, and the recipes of those that are built here."""
