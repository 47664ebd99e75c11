"""Readers of foreign formats, one a format; `core` finds them by name and never imports them. Need numpy only."""
