"""Does the search find the best plan?  Against enumeration, and against plans that others would make."""
