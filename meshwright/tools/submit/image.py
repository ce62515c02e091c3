"""The container image of packaging/docker/Dockerfile.cuda, by which manifests are written."""

IMAGE = "meshwright:cuda"
"""Its name and tag, to which a registry's address is added."""

IMAGE_USER = 1000
"""The user and group that its programs run as."""

LOCK_HELPER = "meshwright-lock"
"""A program of the image, setpriv of util-linux with a file capability: the one way for a user that is not root to lock
memory, since Kubernetes' capabilities.add has no ambient set."""
