"""Plans record this: predictions of different versions do not compare."""

COST_MODEL_VERSION = "13"
