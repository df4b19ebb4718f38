"""Planning: from a request to a plan, or to the reason why there is none."""
