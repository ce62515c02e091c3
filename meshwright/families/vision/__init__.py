"""Classifiers of images: ViT, and ResNeXt with parallel paths, the branches of SUPER."""
