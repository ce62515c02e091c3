"""Facts about the container image of packaging/docker/Dockerfile.cuda, used in manifests."""

IMAGE = "meshwright:cuda"
"""The image's name and tag, without a registry's address."""

IMAGE_USER = 1000
"""The user and group of the image's programs."""

LOCK_HELPER = "meshwright-lock"
"""A program in the image: util-linux' setpriv with a file capability. A user other than root cannot lock memory in any
other way, since Kubernetes' capabilities.add sets no ambient capabilities."""
