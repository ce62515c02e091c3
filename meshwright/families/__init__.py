"""Families of models, a folder each: sections, models, converter, and the data, measures and configs of one family."""
