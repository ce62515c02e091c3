"""A family is a folder: its sections, models, converter, and the data, measures and configs that it alone uses."""
