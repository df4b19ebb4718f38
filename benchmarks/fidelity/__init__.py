"""Are predicted times and programs those of real runs and of hand-written code?"""
