"""Images: digits and class folders are packed once; the held-out images; a batch's tensors; refusals by name."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.config import Config, parse_config
from meshwright.families.vision.data_section import ImageData
from meshwright.families.vision.images import HEADER, ImageSamples, PackedImages, images_for, open_images, open_source
from meshwright.families.vision.section import Vit
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.ranks.foreign import RefusedError

if find_spec("sklearn") is None:  # imported by the first test of digits, in three seconds
    pytest.skip("pip install 'meshwright[images]'", allow_module_level=True)
image = pytest.importorskip("PIL.Image", reason="pip install 'meshwright[images]'")

COLOURS = {"blue": (10, 20, 200), "green": (30, 210, 40), "red": (220, 30, 20)}


def vit(**changes: Any) -> Vit:
    fields = {"family": "vit", "image": 8, "patch": 2, "channels": 1, "classes": 10, "hidden": 8, "heads": 2}
    return Vit.model_validate(fields | changes)


def image_data(**fields: Any) -> ImageData:
    return ImageData(kind="images", **fields)


def digits(cache: Path, **changes: Any) -> PackedImages:
    return images_for(image_data(source="digits", validation=0.2), vit(**changes), cache)


def paint(path: Path, colour: tuple[int, int, int] | int, size: tuple[int, int] = (12, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def paint_classes(folder: Path, each: int = 5) -> Path:
    """Paint `each` images of a colour, one image as a JPEG."""
    for name, colour in COLOURS.items():
        for number in range(each):
            paint(folder / name / f"{number}.{'JPG' if number == 0 else 'png'}", colour)
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedImages:
    return digits(tmp_path_factory.mktemp("images"))


def test_digits_are_scikit_learns(packed: PackedImages) -> None:
    import sklearn.datasets

    held: Any = sklearn.datasets.load_digits()
    assert (packed.header.train, packed.header.validation) == (1438, 359)
    found = {
        (image.tobytes(), int(label))
        for split in ("train", "validation")
        for image, label in zip(packed.array(split, "images"), packed.array(split, "labels"), strict=True)  # type: ignore[arg-type]
    }
    pixels = np.round(held.images * (255 / 16)).astype(np.uint8)
    assert found == {(image.tobytes(), int(label)) for image, label in zip(pixels, held.target, strict=True)}
    assert packed.array("train", "images").max() == 255


def test_every_class_holds_out_its_share(packed: PackedImages) -> None:
    train, validation = np.bincount(packed.array("train", "labels")), np.bincount(packed.array("validation", "labels"))
    assert validation.tolist() == [round(0.2 * count) for count in train + validation]
    assert len(set(packed.array("validation", "labels")[:64].tolist())) == 10, "the first batches are of all classes"


def test_digits_in_another_size_and_in_colour(tmp_path: Path, packed: PackedImages) -> None:
    large = digits(tmp_path, image=16, channels=3)
    pixels = large.array("train", "images")
    assert pixels.shape == (1438, 3, 16, 16)
    assert (pixels[:, 0] == pixels[:, 1]).all()
    means = packed.array("train", "images").mean((1, 2, 3))
    np.testing.assert_allclose(pixels.mean((1, 2, 3)), means, atol=2.0)


def test_packed_once(tmp_path: Path) -> None:
    first = digits(tmp_path)
    before = (first.folder / HEADER).stat().st_mtime_ns
    again = digits(tmp_path)
    assert (again.folder, (again.folder / HEADER).stat().st_mtime_ns) == (first.folder, before)
    others = {
        digits(tmp_path, image=4).folder,
        images_for(image_data(source="digits"), vit(), tmp_path).folder,
    }
    assert len(others | {first.folder}) == 3


@pytest.mark.parametrize("split", ["train", "validation"])
def test_damage_is_found_by_name(tmp_path: Path, split: Any) -> None:
    made = digits(tmp_path)
    path = made.folder / f"{split}-images.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    open_images(made.folder)
    with pytest.raises(DataError, match=f"{split}-images.npy: is damaged"):
        digits(tmp_path)
    np.save(path, np.zeros((3, 1, 8, 8), np.uint8))
    with pytest.raises(DataError, match=f"{split}-images.npy: is uint8"):
        open_images(made.folder)
    path.write_bytes(bytes(content))
    (made.folder / f"{split}-labels.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=f"{split}-labels.npy: cannot be read"):
        open_images(made.folder)
    (made.folder / HEADER).write_text("{}")
    with pytest.raises(DataError, match="is no header of packed images"):
        open_images(made.folder)


def test_class_folders(tmp_path: Path) -> None:
    source = paint_classes(tmp_path / "colours")
    (source / "red" / ".hidden").write_text("")
    made = images_for(
        ImageData(kind="images", source=str(source), validation=0.2), vit(channels=3, classes=3), tmp_path / "cache"
    )
    assert made.header.classes == ("blue", "green", "red")
    assert (made.header.source, made.header.train, made.header.validation) == ("colours", 12, 3)
    for split in ("train", "validation"):
        wanted = np.array(list(COLOURS.values()))[made.array(split, "labels")]  # type: ignore[arg-type]
        found = made.array(split, "images").mean((2, 3))  # type: ignore[arg-type]
        np.testing.assert_allclose(found, wanted, atol=4)  # JPEG is near


def test_the_middle_is_cut_out_and_grey_is_made(tmp_path: Path) -> None:
    wide = np.zeros((8, 16), np.uint8)
    wide[:, 4:12] = 200
    (tmp_path / "all").mkdir()
    image.fromarray(wide).save(tmp_path / "all" / "wide.png")
    image.fromarray(wide.T).save(tmp_path / "all" / "tall.png")
    source = open_source(str(tmp_path))
    for number in (0, 1):
        assert (source.read(number, 8, 1) == 200).all()
        assert source.read(number, 4, 3).shape == (3, 4, 4)


def test_folders_that_are_split_already(tmp_path: Path) -> None:
    source = tmp_path / "colours"
    paint_classes(source / "train", 4)
    paint(source / "validation" / "green" / "only.png", COLOURS["green"])
    model = vit(channels=3)
    made = images_for(image_data(source=str(source)), model, tmp_path / "cache")
    assert (made.header.train, made.header.validation) == (12, 1)
    assert made.array("validation", "labels").tolist() == [1]
    with pytest.raises(ConfigError, match=r"data\.validation=0\.3 has no effect: .* has a validation folder"):
        images_for(image_data(source=str(source), validation=0.3), model, tmp_path / "cache")
    paint(source / "validation" / "violet" / "only.png", (90, 0, 90))
    with pytest.raises(DataError, match=r"validation/violet: is a class that .*train has not"):
        images_for(image_data(source=str(source)), model, tmp_path / "cache")


def refusal(source: Path, cache: Path) -> str:
    with pytest.raises(DataError) as caught:
        images_for(image_data(source=str(source), validation=0.2), vit(), cache)
    assert not list(cache.glob("images-*")), "half a folder was left behind"
    return str(caught.value)


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    source, cache = paint_classes(tmp_path / "colours"), tmp_path / "cache"
    broken = source / "red" / "3.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    assert refusal(source, cache).startswith(f"{broken}: cannot be decoded (")
    broken.write_bytes(b"no image at all")
    assert refusal(source, cache).startswith(f"{broken}: cannot be decoded (")
    image.fromarray(np.full((8, 8), 40000, np.uint16)).save(broken)
    assert refusal(source, cache).startswith(f"{broken}: has pixels of more than 8 bits (mode I;16)")
    broken.write_bytes(whole)
    (source / "red" / "notes.txt").write_text("")
    assert refusal(source, cache) == (
        f"{source / 'red' / 'notes.txt'}: is no image; a class folder holds jpg, jpeg and png files alone"
    )
    (source / "red" / "notes.txt").unlink()
    (source / "empty").mkdir()
    assert refusal(source, cache) == f"{source / 'empty'}: is a class without images"
    assert refusal(source / "red", cache).startswith(f"{source / 'red'}: holds no class folders")
    assert refusal(tmp_path / "none", cache).startswith(f"{tmp_path / 'none'}: no such folder")
    paint(tmp_path / "one" / "class" / "image.png", 3)
    assert refusal(tmp_path / "one", cache).startswith("one: leaves the validation split without images")


@pytest.mark.parametrize("place", ["red/linked.png", "linked"])
def test_links_of_an_image_folder_are_refused_by_name(tmp_path: Path, place: str) -> None:
    source = paint_classes(tmp_path / "classes")
    (tmp_path / "outside").mkdir()
    paint(tmp_path / "outside" / "x.png", (1, 2, 3))
    target = tmp_path / "outside" / "x.png" if place.endswith("png") else tmp_path / "outside"
    (source / place).symlink_to(target)
    with pytest.raises(
        RefusedError, match=f"{place.rsplit('/', maxsplit=1)[-1]} is a link to .*copy the file into the folder"
    ):
        open_source(str(source))


def test_too_many_classes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.classes=9 is fewer than the 10 classes of digits"):
        digits(tmp_path, classes=9)


@pytest.mark.parametrize("missing, package", [("sklearn.datasets", "scikit-learn"), ("PIL.Image", "pillow")])
def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, package: str
) -> None:
    real = importlib.import_module

    def find(name: str) -> Any:
        if name == missing:
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", find)
    with pytest.raises(DataError, match=rf"images need {package}.*: pip install 'meshwright\[images\]'"):
        digits(tmp_path)


def test_an_epoch_is_every_image_once(packed: PackedImages) -> None:
    data = ImageSamples(packed, "train", seed=3)
    size = len(data)
    epochs = [data.samples(epoch * size, size) for epoch in range(2)]
    for epoch in epochs:
        assert sorted(x.numpy().tobytes() for x in epoch["images"]) == sorted(
            x.tobytes() for x in packed.array("train", "images")
        )
    assert not torch.equal(epochs[0]["labels"], epochs[1]["labels"])
    assert not torch.equal(epochs[0]["labels"], ImageSamples(packed, "train", seed=4).samples(0, size)["labels"])


def test_batches(packed: PackedImages) -> None:
    data = ImageSamples(packed, "validation", seed=3)
    batch = data.samples(350, 20)  # over the end of the epoch
    assert (batch["images"].shape, batch["images"].dtype) == ((20, 1, 8, 8), torch.uint8)
    assert (batch["labels"].shape, batch["labels"].dtype) == ((20, 1), torch.int64)
    rows = data.samples(358, 5)
    torch.testing.assert_close(batch["images"][8:13], rows["images"], rtol=0, atol=0)
    torch.testing.assert_close(batch["labels"][8:13], rows["labels"], rtol=0, atol=0)
    held = data.held_out(7, 3)
    np.testing.assert_array_equal(held["images"].numpy(), packed.array("validation", "images")[7:10])
    np.testing.assert_array_equal(held["labels"][:, 0].numpy(), packed.array("validation", "labels")[7:10])


def config_of(**batch: Any) -> Config:
    tree = {"data": {"source": "digits", "validation": 0.2}, "validation": {"every": 1}}
    return parse_config(tree | {"model": "vit-digits", "batch": batch})


def test_the_door_to_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    config = config_of(**{"global": 32})
    opened = config.data.open(config, config.data.prepare(config, lambda text, done: None))
    assert opened.held_out is not None
    assert (len(opened.train), len(opened.held_out), opened.tokenizer) == (1438, 359, None)
    with pytest.raises(DataError, match=r"has 359 samples, fewer than batch\.global=400"):
        config_of(**{"global": 400}).data.prepare(config_of(**{"global": 400}), lambda text, done: None)
