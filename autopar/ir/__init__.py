"""Plain data that passes between the layers of the compiler. Nothing here imports torch."""
