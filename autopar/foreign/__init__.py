"""Jobs of other frameworks: read, checked, written, and compared with what was measured."""
