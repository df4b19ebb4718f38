"""From a model to a graph in segments."""
