"""Pictures of a plan: the timeline of its step, a trace of that, and pages with figures."""
