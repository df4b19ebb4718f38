"""Plans in the words of other frameworks, and in the files of their jobs."""
