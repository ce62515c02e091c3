"""`meshwright verify`: prove that a layout has one device's losses, gradients, and weights after some steps."""
