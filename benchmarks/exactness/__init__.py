"""Does a parallel program compute what one device does?  Losses, models, plans and damaged programs."""
