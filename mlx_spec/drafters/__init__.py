"""Drafters: each proposes tokens through the one ``Drafter`` protocol."""
