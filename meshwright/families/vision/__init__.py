"""Classifiers of images: ViT, and ResNeXt, whose branches SUPER deals out."""
