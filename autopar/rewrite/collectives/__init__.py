"""Changes of layout: collectives with written-down backwards."""
