"""The version of the cost models. Plans record it, since predictions of different versions are not
comparable.
"""

COST_MODEL_VERSION = "16"
