"""Plain data that crosses the layers of the compiler.  Nothing here imports torch."""
