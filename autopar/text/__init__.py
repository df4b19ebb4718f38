"""Words and tables that several commands print."""
