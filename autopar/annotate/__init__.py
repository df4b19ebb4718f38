"""Annotate: what every strategy and every change of layout costs on one device."""
