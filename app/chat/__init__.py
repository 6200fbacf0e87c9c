"""The terminal chat: one engine thread, messages one way, widgets."""
